"""The stalls a reader sees: the time of every step, along the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from experiments.plots import style

Point = tuple[int, float]
# One stall of a second would flatten everything else.
CLIPPED_PERCENTILE, HEADROOM = 99, 1.3
MIN_TOKENS = 8  # of the x axis
# The running median looks this far to each side, as a share of the output's length.
REACH_FRAC, MIN_REACH = 1 / 40, 2


def step_gaps(series: Mapping[str, Sequence[Point]], title: str) -> Figure | None:
    """A dot per step and a running median per arm; None without a single point.

    A point is the output position of a step's first token (tokens after the request's first) and the gap before it
    in ms. The y axis starts at 0; the few points above its end are drawn at the edge, and counted.
    """
    drawn = {arm: np.array(points, dtype=float) for arm, points in series.items() if points}
    if not drawn:
        return None
    figure, axes = style.new_axes(title)
    style.label_axes(
        axes,
        "output position of the step, tokens after the first",
        "time since the step before, ms\n(dots: steps, lines: running median)",
    )
    limit_ms = _limit_ms([points[:, 1] for points in drawn.values()])
    last = max(MIN_TOKENS, *(points[:, 0].max() for points in drawn.values()))
    axes.set_ylim(0, limit_ms)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    handles = [_draw_arm(axes, index, points, limit_ms) for index, points in enumerate(drawn.values())]
    _note_clipped(axes, sum(int((points[:, 1] > limit_ms).sum()) for points in drawn.values()))
    style.legend_below(figure, handles, list(drawn))
    return figure


def running_median(points: np.ndarray) -> np.ndarray:
    """`[n, 2]` (position, ms) in, one row per distinct position out: the median of all points near it."""
    points = points[np.argsort(points[:, 0], kind="stable")]
    positions = np.unique(points[:, 0])
    reach = max(MIN_REACH, REACH_FRAC * (positions[-1] - positions[0]))
    starts = np.searchsorted(points[:, 0], positions - reach, side="left")
    ends = np.searchsorted(points[:, 0], positions + reach, side="right")
    medians = [np.median(points[start:end, 1]) for start, end in zip(starts, ends, strict=True)]
    return np.column_stack([positions, medians])


def _limit_ms(gaps_ms: Sequence[np.ndarray]) -> float:
    """Above almost all points of every arm, and above all where that costs little."""
    high = max(float(np.percentile(gaps, CLIPPED_PERCENTILE)) for gaps in gaps_ms)
    highest = max(float(gaps.max()) for gaps in gaps_ms)
    return (1.05 * highest if highest <= 1.5 * high else HEADROOM * high) or 1.0


def _draw_arm(axes: Axes, index: int, points: np.ndarray, limit_ms: float) -> Line2D:
    """The arm's median line; its dots are lighter."""
    colour = style.ARM_COLOURS[index % len(style.ARM_COLOURS)]
    is_inside = points[:, 1] <= limit_ms
    axes.plot(
        *points[is_inside].T, ".", color=style.lighter(colour), alpha=0.6, markersize=6, markeredgewidth=0
    )
    above = points[~is_inside, 0]
    if len(above):  # an empty line that is not clipped would confuse the layout
        axes.plot(above, np.full(len(above), limit_ms), "^", color=colour, markersize=6, clip_on=False)
    (line,) = axes.plot(
        *running_median(points).T, color=colour, linewidth=2, zorder=3, marker=_marker(points)
    )
    return line


def _marker(points: np.ndarray) -> str:
    """A line through one position is invisible."""
    return "o" if len(np.unique(points[:, 0])) == 1 else ""


def _note_clipped(axes: Axes, num_above: int) -> None:
    if num_above:
        text = f"▲ {num_above} {'point' if num_above == 1 else 'points'} above the axis"
        axes.text(
            1,
            1.02,
            text,
            ha="right",
            va="bottom",
            transform=axes.transAxes,
            fontsize=style.FONT_PT,
            color=style.DARK,
        )
