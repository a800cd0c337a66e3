"""Shares: one bar per case, divided by what took how much of it; what is predicted is pale and dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.plots import style

BAR_IN, FRAME_IN = 0.52, 1.7
BAR_HEIGHT = 0.66
# Narrower parts have no room for their share.
LEAST_LABELLED_PCT = 6


@dataclass(frozen=True)
class ShareBar:
    """`parts` by name, in any unit; `total` is written behind the bar."""

    label: str
    parts: Mapping[str, float]
    total: str
    is_theory: bool = False


def shares(bars: Sequence[ShareBar], title: str, x_label: str) -> Figure | None:
    """From top to bottom in the given order, a colour for each name; None without bars."""
    if not bars:
        return None
    figure, axes = style.new_axes(title, height_in=FRAME_IN + BAR_IN * len(bars))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    colours = dict(zip(names, style.ARM_COLOURS, strict=False))
    for row, bar in enumerate(bars):
        left = 0.0
        for name, part in bar.parts.items():
            width = 100 * part / sum(bar.parts.values())
            colour = style.lighter(colours[name], 0.6) if bar.is_theory else colours[name]
            axes.barh(
                row,
                width,
                BAR_HEIGHT,
                left,
                color=colour,
                edgecolor=colours[name],
                linestyle="--" if bar.is_theory else "-",
            )
            if width >= LEAST_LABELLED_PCT:
                text_colour = style.DARK if bar.is_theory else "white"
                middle = left + width / 2
                axes.text(
                    middle,
                    row,
                    f"{width:.0f} %",
                    ha="center",
                    va="center",
                    color=text_colour,
                    size=style.FONT_PT,
                )
            left += width
        axes.text(101, row, bar.total, va="center", fontsize=style.FONT_PT, color=style.DARK)
    style.label_axes(axes, x_label)
    style.legend_below(figure, [Patch(color=colours[name]) for name in names], names)
    return figure
