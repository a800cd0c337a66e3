"""Ratios with their intervals, one below the other (a forest plot)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style

COLOURS = {"faster": style.BLUE, "slower": style.VERMILION}
LINE_IN, ROW_IN, FRAME_IN = 0.2, 0.42, 1.4
LABEL_CHARACTERS = 42
# Steps of 1.003x are noise: a narrower axis would make them look large.
MIN_SPAN = 1.02
NARROW = 0.02
MIN_TICKS, MAX_TICKS = 3, 9
MANTISSAS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 3), (1,))
ROUNDING = 1e-9
STEPS = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True)
class IntervalRow:
    """A ratio above 0 with its 95 % interval (None: a single pair has none) and what is concluded from it."""

    label: str
    value: float
    ci_low: float | None
    ci_high: float | None
    verdict: str

    @property
    def text(self) -> str:
        low, high = self.ends
        # 1.00x [1.00, 1.00] would say nothing
        digits = 3 if 0 < high - low < NARROW else 2 if high < 10 else 1
        interval = (
            "" if self.ci_low is None or self.ci_high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
        )
        return f"{self.value:.{digits}f}x{interval} {self.verdict}".rstrip()

    @property
    def ends(self) -> tuple[float, float]:
        """Of the interval; the value itself where there is none."""
        low = self.value if self.ci_low is None else self.ci_low
        high = self.value if self.ci_high is None else self.ci_high
        return low, high


def intervals(rows: Sequence[IntervalRow], title: str, x_label: str) -> Figure | None:
    """A row per comparison, first on top, on a logarithmic axis of ratios; None for no rows.

    Grows in height with the rows, beyond the other figures' from about ten rows on.
    """
    if not rows:
        return None
    labels = [style.wrap(row.label, LABEL_CHARACTERS) for row in rows]
    row_in = max(ROW_IN, LINE_IN * max(label.count("\n") + 1 for label in labels) + 0.1)
    figure, axes = style.new_axes(title, height_in=FRAME_IN + row_in * len(rows))
    axes.set_xscale("log")
    axes.axvline(1, color=style.DARK, linewidth=1.2)
    for position, row in enumerate(rows):
        _draw_row(axes, position, row)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    low, high = _limits(rows)
    axes.set_xlim(low, high)
    axes.set_xticks([], [], minor=True)
    marks = ticks(low, high)
    axes.set_xticks(marks, [f"{mark:g}x" for mark in marks])
    style.label_axes(axes, x_label, x_characters=55)
    return figure


def ticks(low: float, high: float) -> list[float]:
    """Three to nine round ratios within limits that include 1, on both sides of 1 where the axis reaches far."""
    for mantissas in MANTISSAS:
        found = _round_ratios(low, high, mantissas)
        if MIN_TICKS <= len(found) <= MAX_TICKS and _balanced(found, low, high):
            return found
    for step in STEPS:
        first, last = math.ceil(low / step - ROUNDING), math.floor(high / step + ROUNDING)
        if last - first + 1 >= MIN_TICKS and first > 0:
            return [float(f"{count * step:g}") for count in range(first, last + 1)]
    return [1.0]


def _round_ratios(low: float, high: float, mantissas: Sequence[float]) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    marks = [float(f"{mantissa * 10.0**decade:g}") for decade in decades for mantissa in mantissas]
    return [mark for mark in marks if low <= mark <= high]


def _balanced(marks: Sequence[float], low: float, high: float) -> bool:
    """Does every side of 1 that takes a fifth of the axis have a mark?"""
    fair = 0.2 * math.log(high / low)
    has_low, has_high = marks[0] < 1 or -math.log(low) < fair, marks[-1] > 1 or math.log(high) < fair
    return has_low and has_high


def _draw_row(axes: Axes, position: int, row: IntervalRow) -> None:
    colour = COLOURS.get(row.verdict, style.GREY)
    low, high = row.ends
    axes.plot([low, high], [position, position], color=colour, linewidth=2.5, solid_capstyle="butt", zorder=3)
    axes.plot([row.value], [position], "o", color=colour, markersize=9, markeredgecolor="white", zorder=4)
    axes.text(
        1.02,
        position,
        row.text,
        va="center_baseline",
        transform=axes.get_yaxis_transform(),
        fontsize=style.FONT_PT,
        color=style.darker(colour),
    )


def _limits(rows: Sequence[IntervalRow]) -> tuple[float, float]:
    """Around all intervals and 1, with a margin."""
    ends = [end for row in rows for end in row.ends] + [1.0]
    low, high = min(ends), max(ends)
    margin = max((high / low) ** 0.06, MIN_SPAN)
    return low / margin, high * margin
