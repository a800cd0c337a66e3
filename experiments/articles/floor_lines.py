"""Theory beside what was measured: the floor of the hardware, and that of the kernels; as lines, cells, a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.articles.lab import Floors, Lab
from experiments.articles.timing import Timing
from experiments.plots.curves import Line

# What a prediction may be off by, as a share of what was measured.
AGREES_FRAC = 0.25
NO_OVERHEAD = (
    "the overhead of a pass is not known: this weight format can't hold the tiny model that shows it"
)
FLOOR_HEADING = ("hardware floor, ms", "kernels alone, ms")


def measured_line(timings: Mapping[int, Timing], label: str = "measured") -> Line:
    """Medians, with their quartiles as a band."""
    return Line(
        label,
        [(step, timing.median_ms) for step, timing in timings.items()],
        spread=[(timing.low_ms, timing.high_ms) for timing in timings.values()],
    )


def floor_lines(floors: Mapping[int, Floors]) -> list[Line]:
    """Both theories; that of the kernels where they were timed."""
    kernels = [(step, floor.kernels_ms) for step, floor in floors.items() if floor.kernels_ms is not None]
    lines = [
        Line(
            "hardware floor (measured ceilings)",
            [(step, floor.hardware_ms) for step, floor in floors.items()],
            is_theory=True,
        ),
        Line("kernels timed alone, summed, and overhead", kernels, is_theory=True),
    ]
    return [line for line in lines if line.points]


def floor_cells(floor: Floors | None) -> list[str]:
    """Milliseconds of both theories."""
    if floor is None:
        return ["-", "-"]
    return [f"{floor.hardware_ms:.2f}", "-" if floor.kernels_ms is None else f"{floor.kernels_ms:.1f}"]


def agreement(timings: Mapping[int, Timing], floors: Mapping[int, Floors]) -> str:
    """How far the kernels' prediction is from what was measured, and where it is off by more than a quarter."""
    predicted = {step: floor.kernels_ms for step, floor in floors.items() if floor.kernels_ms is not None}
    beside = shares_of_measured(predicted, timings)
    if not beside:
        return "kernels were not timed alone"
    return f"kernels timed alone on cold weights, with the overhead of a pass, predict {beside}"


def step_agreement(lab: Lab, timings: Mapping[int, Timing], floors: Mapping[int, Floors]) -> str:
    """The same of decode steps, where the strategy's are those that theory speaks of."""
    if lab.has_plain_steps:
        return agreement(timings, floors)
    return (
        "theory is that of a plain step, one pass over one token of each row behind a cache; this strategy's steps are "
        "others, and are not predicted"
    )


def shares_of_measured(predicted_ms: Mapping[int, float], timings: Mapping[int, Timing]) -> str:
    """Predictions as shares of what was measured, and where they are off; empty where nothing has both."""
    ratios = {step: ms / timings[step].median_ms for step, ms in predicted_ms.items() if step in timings}
    if not ratios:
        return ""
    spread = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} of what was measured"
    off = [f"{step:,}" for step, ratio in ratios.items() if abs(ratio - 1) > AGREES_FRAC]
    where = "everywhere" if len(off) == len(ratios) else f"at {', '.join(off)}"
    return f"{spread}: {f'off by more than {AGREES_FRAC:.0%} {where}' if off else 'close everywhere'}"
