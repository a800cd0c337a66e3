"""A decode step for more and more rows: its floor, what a row adds, and where it leaves the slope of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.batches import measure_batches
from experiments.articles.findings import Findings, Rows
from experiments.articles.fits import line_through
from experiments.articles.floor_lines import (
    FLOOR_HEADING,
    floor_cells,
    floor_lines,
    measured_line,
    step_agreement,
)
from experiments.articles.lab import Floors, Lab
from experiments.articles.steps import DecodedSteps, few_steps_notes
from experiments.articles.study import ArticleOptions
from experiments.plots.curves import Line, Panel, curves


@dataclass
class BatchCurveOptions(ArticleOptions):
    """`batches`: rows that are decoded together; `prompt_tokens`: what each has read; `new_tokens`: written by each."""

    title: ClassVar[str] = "One decode step for more and more rows"
    decodes: ClassVar[bool] = True

    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    prompt_tokens: int = 64
    new_tokens: int = 12

    def __post_init__(self) -> None:
        self.check_at_least(batches=1, prompt_tokens=2, new_tokens=2)

    def measure(self, lab: Lab) -> Findings:
        measured = measure_batches(lab, self.batches, self.prompt_tokens, self.new_tokens)
        found, floors = measured.steps, measured.floors
        first = found[min(found)]
        most = max(found, key=lambda batch: found[batch].tok_s)
        gain, slowdown = (
            found[most].tok_s / first.tok_s,
            found[most].timing.median_ms / first.timing.median_ms,
        )
        floor_ms, row_ms = line_through({batch: steps.timing.median_ms for batch, steps in found.items()})
        headline = (
            f"A step for {most} rows takes {slowdown:.1f} times as long as for {min(found)}, "
            f"and writes {gain:.1f} times as many tokens a second"
        )
        return Findings(
            headline,
            curves={
                "curve_batch/step_ms": [(batch, steps.timing.median_ms) for batch, steps in found.items()],
                "curve_batch/tok_s": [(batch, steps.tok_s) for batch, steps in found.items()],
            },
            metrics={"curve_batch/fit_floor_ms": floor_ms, "curve_batch/fit_row_ms": row_ms}
            if len(found) > 1
            else {},
            tables={"One step, and the tokens it writes": _table(found, floors)},
            figures=_figures(headline, found, floors),
            notes=[
                *_line_notes(found, floor_ms, row_ms),
                *(_memory_notes(floors) if lab.has_plain_steps else []),
                *few_steps_notes(found),
                step_agreement(lab, {batch: steps.timing for batch, steps in found.items()}, floors),
            ],
            limits=measured.limits,
        )


def _line_notes(found: Mapping[int, DecodedSteps], floor_ms: float, row_ms: float) -> list[str]:
    if len(found) < 2:
        return []
    return [
        f"fitted, a step is {floor_ms:.1f} ms + {row_ms:.2f} ms for each row (least squares of relative errors)"
    ]


def _memory_notes(floors: Mapping[int, Floors]) -> list[str]:
    computing = [batch for batch, floor in floors.items() if floor.compute_ms > floor.memory_ms]
    if not computing:
        return ["by this machine's ceilings every one of these steps is limited by memory"]
    return [
        f"by this machine's ceilings memory limits a step below {min(computing)} rows, arithmetic from there on"
    ]


def _table(found: Mapping[int, DecodedSteps], floors: Mapping[int, Floors]) -> Rows:
    heading = ["rows", "step, ms [quartiles]", "first, ms", "tok/s", "tok/s of a row", *FLOOR_HEADING]
    return [
        heading,
        *(
            [
                str(batch),
                str(steps.timing),
                f"{steps.timing.first_ms:.1f}",
                f"{steps.tok_s:.0f}",
                f"{steps.tok_s / batch:.1f}",
                *floor_cells(floors.get(batch)),
            ]
            for batch, steps in found.items()
        ),
    ]


def _figures(
    headline: str, found: Mapping[int, DecodedSteps], floors: Mapping[int, Floors]
) -> dict[str, Figure | None]:
    timings = {batch: steps.timing for batch, steps in found.items()}
    step = Panel(
        [measured_line(timings), *floor_lines(floors)], "rows decoded together", "time of a step, ms"
    )
    rates = [(batch, steps.tok_s) for batch, steps in found.items()]
    linear = [(batch, rates[0][1] * batch / rates[0][0]) for batch in found]
    rate = Panel(
        [Line("measured", rates), Line("if rows cost nothing", linear, is_theory=True)],
        "rows decoded together",
        "tokens per second, all rows",
    )
    return {"batch_curve.png": curves([step, rate], headline)}
