"""Reading and writing for more and more rows: one already fills the machine alone, the other shares the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from matplotlib.figure import Figure

from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import FLOOR_HEADING, agreement, floor_cells
from experiments.articles.lab import Floors, Lab, along, limits
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing, repeated
from experiments.plots.curves import Line, Panel, curves

# A batch that brings less than this in tokens a second brings nothing: times vary by as much.
NO_GAIN = 1.25
LABELS = {
    "prefill": "prefill, row by row",
    "prefill_joint": "prefill, in one joint pass",
    "decode": "decode",
}


@dataclass(frozen=True)
class Phases:
    """One batch: its prompts read row by row, read in one joint pass, and one decode step behind them."""

    rows: int
    prompt_tokens: int
    each: Timing
    joint: Timing
    step: Timing

    @property
    def each_tok_s(self) -> float:
        return self.each.per(self.rows * self.prompt_tokens)

    @property
    def joint_tok_s(self) -> float:
        return self.joint.per(self.rows * self.prompt_tokens)

    @property
    def step_tok_s(self) -> float:
        return self.step.per(self.rows)


@dataclass
class PhasesAndBatchingOptions(ArticleOptions):
    """`batches`: rows that are read, and decoded, together; `prompt_tokens` of each."""

    title: ClassVar[str] = "What a batch brings to reading, and what to writing"

    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    prompt_tokens: int = 128

    def __post_init__(self) -> None:
        self.check_at_least(batches=1, prompt_tokens=1)

    def measure(self, lab: Lab) -> Findings:
        found, missing = along(
            self.batches, "batch", lambda batch: measure_phases(lab, batch, self.prompt_tokens)
        )
        reading, _ = along(list(found), "batch", lambda batch: lab.floors(batch, self.prompt_tokens, 0))
        writing, _ = along(
            list(found), "batch", lambda batch: lab.floors(batch, 1, self.prompt_tokens, kernels=True)
        )
        headline = _headline(found)
        gains = _gains(found)
        return Findings(
            headline,
            curves={
                "curve_batch/step_ms": [(batch, at.step.median_ms) for batch, at in found.items()],
                "curve_batch/tok_s": _rates(found)["decode"],
                "curve_batch/prefill_ms": [(batch, at.each.median_ms) for batch, at in found.items()],
                "curve_batch/prefill_tok_s": _rates(found)["prefill"],
                "curve_batch/prefill_joint_tok_s": _rates(found)["prefill_joint"],
            },
            metrics={f"phases/{phase}_gain": gain for phase, gain in gains.items()},
            tables={"Tokens a second of all rows": _table(found, reading, writing)},
            figures=_figures(headline, found, reading, writing),
            notes=[
                "this engine reads prompts row by row, each in a pass of its own: a batch of prompts takes as long as "
                f"the prompts one after the other, whatever the machine could do ({gains['prefill']:.2f} times the "
                f"tokens a second of {min(found)} here)",
                f"so the same prompts were also read in one joint pass: {gains['prefill_joint']:.2f} times the "
                f"tokens a second of {min(found)}; where that is near 1, the {self.prompt_tokens} tokens of one prompt "
                "already keep the arithmetic busy, and reading row by row loses nothing",
                f"the first time, {min(found)} took {found[min(found)].each.first_ms:.1f} ms to read, and a step "
                f"{found[min(found)].step.first_ms:.1f} ms: neither is counted",
                f"decode steps: {agreement({batch: at.step for batch, at in found.items()}, writing)}",
            ],
            limits=missing,
        )


def measure_phases(lab: Lab, rows: int, prompt_tokens: int) -> Phases:
    """Over one cache: all prompts read, twice in different ways, then a step for all. Raises LimitError."""
    runner = lab.runner(rows, prompt_tokens + 1, lab.point.config.prefill_chunk)
    prompts = [lab.random_ids(prompt_tokens, row) for row in range(rows)]
    joint = torch.tensor(prompts, device=lab.device)
    slots = range(rows)

    def release() -> None:
        for slot in slots:
            runner.release(slot)

    with limits():
        each = repeated(lambda: runner.prefill(prompts, slots), lab.device, release)
        # A pass that appends as many tokens to every empty row is a joint prefill.
        together = repeated(lambda: runner.decode(joint), lab.device, release)
        with torch.inference_mode():
            runner.prefill(prompts, slots)
    return Phases(rows, prompt_tokens, each, together, lab.pass_on(runner, 1))


def _rates(found: Mapping[int, Phases]) -> dict[str, list[tuple[int, float]]]:
    """Tokens a second of all rows by batch, for each way of reading and for writing."""
    return {
        "prefill": [(batch, at.each_tok_s) for batch, at in found.items()],
        "prefill_joint": [(batch, at.joint_tok_s) for batch, at in found.items()],
        "decode": [(batch, at.step_tok_s) for batch, at in found.items()],
    }


def _gains(found: Mapping[int, Phases]) -> dict[str, float]:
    """The rate of the largest batch over that of the smallest, by phase."""
    return {phase: points[-1][1] / points[0][1] for phase, points in _rates(found).items()}


def _headline(found: Mapping[int, Phases]) -> str:
    """Of reading in one joint pass: row by row no batch can gain anything."""
    gains = _gains(found)
    ends = f"From {min(found)} to {max(found)} rows"
    reading, writing = gains["prefill_joint"], gains["decode"]
    if reading < NO_GAIN <= writing:
        return (
            f"{ends} writing brings {writing:.1f} times the tokens a second, reading in one joint pass nothing "
            f"({reading:.2f} times)"
        )
    both = f"writing brings {writing:.2f} times the tokens a second, reading in one joint pass {reading:.2f} times"
    return f"{ends} {both}"


def _table(found: Mapping[int, Phases], reading: Mapping[int, Floors], writing: Mapping[int, Floors]) -> Rows:
    heading = [
        "rows",
        "prefill row by row, ms",
        "tok/s",
        "prefill jointly, tok/s",
        FLOOR_HEADING[0],
        "decode step, ms",
        "tok/s",
        *FLOOR_HEADING,
    ]
    return [
        heading,
        *(
            [
                str(batch),
                str(at.each),
                f"{at.each_tok_s:.0f}",
                f"{at.joint_tok_s:.0f}",
                floor_cells(reading.get(batch))[0],
                str(at.step),
                f"{at.step_tok_s:.1f}",
                *floor_cells(writing.get(batch)),
            ]
            for batch, at in found.items()
        ),
    ]


def _figures(
    headline: str, found: Mapping[int, Phases], reading: Mapping[int, Floors], writing: Mapping[int, Floors]
) -> dict[str, Figure | None]:
    first = min(found)
    prompt_tokens = found[first].prompt_tokens
    floors = {
        "prefill at the hardware floor": [
            (batch, 1e3 * batch * prompt_tokens / floor.hardware_ms) for batch, floor in reading.items()
        ],
        "decode at the hardware floor": [
            (batch, 1e3 * batch / floor.hardware_ms) for batch, floor in writing.items()
        ],
    }
    rates = {LABELS[phase]: points for phase, points in _rates(found).items()}
    absolute = [Line(label, points) for label, points in rates.items()]
    absolute += [Line(label, points, is_theory=True) for label, points in floors.items()]
    relative = [
        Line(label, [(batch, rate / points[0][1]) for batch, rate in points])
        for label, points in rates.items()
    ]
    relative.append(Line("if rows cost nothing", [(batch, batch / first) for batch in found], is_theory=True))
    return {
        "phases_and_batching.png": curves(
            [
                Panel(absolute, "rows of the batch", "tokens per second, all rows"),
                Panel(
                    relative,
                    "rows of the batch",
                    f"tokens per second, over those of {first}",
                ),
            ],
            headline,
        )
    }
