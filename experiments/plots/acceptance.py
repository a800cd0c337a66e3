"""How far drafts are right: acceptance by draft position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import style

BAR_WIDTH = 0.62
# Lower bars have their value above them.
MIN_HEIGHT_FOR_TEXT_PCT = 9
POSITION_IN, HEIGHT_IN = 0.95, 5.0


def acceptance(
    by_position: Sequence[float], conditional: Sequence[float], counts: Sequence[int], title: str
) -> Figure | None:
    """Shares (0 to 1) at draft positions 1 to K; None for K = 0.

    `by_position`: accepted, of the steps that drafted this far (`counts` of them). `conditional`: accepted, of those
    in which the draft token before was. A share that is not a number (no such step) is left out.
    """
    if not by_position:
        return None
    width_in = min(style.WIDTH_IN, max(6.5, 1.5 + POSITION_IN * len(by_position)))
    figure, axes = style.new_axes(title, width_in, HEIGHT_IN)
    positions = range(1, len(by_position) + 1)
    heights_pct = [100 * share for share in by_position]
    bars = axes.bar(positions, heights_pct, BAR_WIDTH, color=style.SKY)
    (line,) = axes.plot(
        positions,
        [100 * share for share in conditional],
        "o-",
        color=style.VERMILION,
        linewidth=2,
        markersize=8,
        markeredgecolor="white",
        clip_on=False,
        zorder=3,
    )
    # Few bars stay slim; beside many, the first count needs room.
    margin = max(0.5, 0.5 * (4 - len(by_position)), 0.045 * len(by_position))
    axes.set_xlim(1 - margin, len(by_position) + margin)
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    style.label_axes(axes, "draft position (n: steps that drafted this far)", "draft tokens accepted, %")
    style.legend_below(
        figure,
        [bars.patches[0], line],
        ["accepted, of steps that drafted this far", "accepted, given that the one before was"],
    )
    axes.set_xticks(positions, [f"{position}\nn={count}" for position, count in enumerate(counts, 1)])
    style.fix_layout(figure)
    _thin_out_ticks(figure, axes, counts)
    _label_bars(figure, axes, heights_pct, conditional)
    return figure


def _thin_out_ticks(figure: Figure, axes: Axes, counts: Sequence[int]) -> None:
    """Where neighbours would touch, label every second position, or third, ..."""
    widest_px = max(style.text_box(figure, f"n={count}  ").width for count in counts)
    every = math.ceil(widest_px / _px_per_position(axes))
    shown = range(0, len(counts), every)
    axes.set_xticks([index + 1 for index in shown], [f"{index + 1}\nn={counts[index]}" for index in shown])


def _label_bars(
    figure: Figure, axes: Axes, heights_pct: Sequence[float], conditional: Sequence[float]
) -> None:
    """Each bar's value at its foot, where the line does not come."""
    if style.text_box(figure, "100 ").width > BAR_WIDTH * _px_per_position(axes):
        return
    for position, (height, share) in enumerate(zip(heights_pct, conditional, strict=True), 1):
        is_tall = height >= MIN_HEIGHT_FOR_TEXT_PCT
        foot_pct = 1.5 if is_tall else height + 1
        is_hidden = not math.isfinite(height) or foot_pct - 3 < 100 * share < foot_pct + 8
        if not is_hidden:
            axes.text(
                position,
                foot_pct,
                f"{height:.0f}",
                ha="center",
                va="bottom",
                fontsize=style.FONT_PT,
                color=style.DARK,
            )


def _px_per_position(axes: Axes) -> float:
    low, high = axes.get_xlim()
    return axes.get_window_extent().width / (high - low)
