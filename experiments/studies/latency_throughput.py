"""What a request waits against what all get: the trade-off that the batch size makes, and where its knee is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.articles.batches import measure_batches
from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import FLOOR_HEADING, floor_cells, step_agreement
from experiments.articles.lab import Floors, Lab
from experiments.articles.steps import DecodedSteps, few_steps_notes
from experiments.articles.study import ArticleOptions
from experiments.plots.curves import Line, Mark, Panel, curves

# A knee nearer to the chord than this, as a share of both ranges, is none: times vary by as much.
LEAST_BEND_FRAC = 0.05


@dataclass
class LatencyThroughputOptions(ArticleOptions):
    """`batches`: rows that are decoded together; `prompt_tokens`: what each has read; `new_tokens`: written by each."""

    title: ClassVar[str] = "The rate of one request against the rate of all"
    decodes: ClassVar[bool] = True

    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    prompt_tokens: int = 64
    new_tokens: int = 24

    def __post_init__(self) -> None:
        self.check_at_least(batches=1, prompt_tokens=2, new_tokens=2)

    def measure(self, lab: Lab) -> Findings:
        measured = measure_batches(lab, self.batches, self.prompt_tokens, self.new_tokens)
        found, floors = measured.steps, measured.floors
        knee = knee_of({batch: (steps.tok_s, steps.timing.median_ms) for batch, steps in found.items()})
        headline = _headline(found, knee)
        return Findings(
            headline,
            curves={
                "curve_batch/step_ms": [(batch, steps.timing.median_ms) for batch, steps in found.items()],
                "curve_batch/tok_s": [(batch, steps.tok_s) for batch, steps in found.items()],
                "curve_batch/tok_s_request": [(batch, steps.tok_s / batch) for batch, steps in found.items()],
            },
            metrics={"curve_batch/knee_rows": knee},
            tables={"What a request gets, and what all get": _table(found, floors, knee)},
            figures=_figures(headline, found, floors, knee),
            notes=[
                "latency is the median gap between a request's steps, throughput the tokens a second of all rows",
                "the knee is the batch farthest below the chord from the first batch to the one of the highest "
                "throughput, both axes scaled to their range (Satopaa et al. 2011, Kneedle); more batches move it",
                *few_steps_notes(found),
                step_agreement(lab, {batch: steps.timing for batch, steps in found.items()}, floors),
            ],
            limits=measured.limits,
        )


def knee_of(points: Mapping[int, tuple[float, float]]) -> int | None:
    """The batch farthest below the chord, of (throughput, latency) by batch; None where the curve hardly bends.

    Batches beyond the highest throughput are worse in both, and no part of the curve.
    """
    best = max(points, key=lambda batch: points[batch][0])
    batches = [batch for batch in sorted(points) if batch <= best]
    (first_rate, first_ms), (last_rate, last_ms) = points[batches[0]], points[batches[-1]]
    if len(batches) < 3 or last_ms <= first_ms:
        return None
    rate, ms = np.array([points[batch] for batch in batches]).T
    below = (rate - first_rate) / (last_rate - first_rate) - (ms - first_ms) / (last_ms - first_ms)
    return batches[int(below.argmax())] if below.max() >= LEAST_BEND_FRAC else None


def _headline(found: Mapping[int, DecodedSteps], knee: int | None) -> str:
    first = found[min(found)]
    most = max(found, key=lambda batch: found[batch].tok_s)

    def bought(batch: int) -> str:
        rate = found[batch].tok_s / first.tok_s
        wait = found[batch].timing.median_ms / first.timing.median_ms
        return f"{rate:.1f} times the throughput for {wait:.1f} times the latency"

    if knee is None:
        return f"No knee from {min(found)} to {max(found)} rows: {most} rows bring {bought(most)} of {min(found)}"
    return f"The knee is at {knee} rows: {bought(knee)} of {min(found)}; {most} rows bring {bought(most)}"


def _table(found: Mapping[int, DecodedSteps], floors: Mapping[int, Floors], knee: int | None) -> Rows:
    heading = [
        "rows",
        "tok/s of all",
        "tok/s of a request",
        "step, ms [quartiles]",
        "first, ms",
        *FLOOR_HEADING,
    ]
    return [
        heading,
        *(
            [
                f"{batch} (knee)" if batch == knee else str(batch),
                f"{steps.tok_s:.0f}",
                f"{steps.tok_s / batch:.1f}",
                str(steps.timing),
                f"{steps.timing.first_ms:.1f}",
                *floor_cells(floors.get(batch)),
            ]
            for batch, steps in found.items()
        ),
    ]


def _figures(
    headline: str, found: Mapping[int, DecodedSteps], floors: Mapping[int, Floors], knee: int | None
) -> dict[str, Figure | None]:
    waits = {batch: (steps.tok_s, steps.timing.median_ms) for batch, steps in found.items()}
    shares = {batch: (steps.tok_s, steps.tok_s / batch) for batch, steps in found.items()}
    # As far as was measured: the floors of large batches are far to the right.
    reached = max(steps.tok_s for steps in found.values())
    rates = {batch: 1e3 * batch / floor.hardware_ms for batch, floor in floors.items()}
    floor = [(rate, floors[batch].hardware_ms) for batch, rate in rates.items() if rate <= 1.5 * reached]
    wait = _panel(waits, knee, "latency: median time of a step, ms")
    least = Line("hardware floor, one token of a row in a step", floor, is_theory=True)
    share = _panel(shares, knee, "tokens per second of a request")
    return {"latency_throughput.png": curves([replace(wait, lines=[*wait.lines, least]), share], headline)}


def _panel(points: Mapping[int, tuple[float, float]], knee: int | None, y_label: str) -> Panel:
    names = [f"{batch}, knee" if batch == knee else str(batch) for batch in points]
    return Panel(
        [Line("measured; numbers are rows", list(points.values()), names=names)],
        "throughput: tokens per second of all rows",
        y_label,
        log_x=False,
        log_y=False,
        marks=[] if knee is None else [Mark("", points[knee])],
    )
