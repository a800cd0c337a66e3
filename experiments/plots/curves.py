"""Curves: what was measured solid with markers, what theory says dashed; one panel or several beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from experiments.plots import style

PANEL_HEIGHT_IN = 5.4
# More markers than this would hide their line.
MOST_MARKERS = 40
# A logarithmic y axis from its least to its most with ticks between powers of ten.
MOST_LABELLED_RATIO = 3000.0


@dataclass(frozen=True)
class Line:
    """Points (x, y), in order of x; `spread`: (low, high) of each, drawn as a band. Theory is dashed.

    `names`: a short text for each point, written above it, on the side that the line leaves free.
    """

    label: str
    points: Sequence[tuple[float, float]]
    is_theory: bool = False
    spread: Sequence[tuple[float, float]] | None = None
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A place worth a word: a ring there, the text beside it."""

    text: str
    at: tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. On a logarithmic x axis each measured x is a tick where there is room."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    log_x: bool = True
    log_y: bool = True
    marks: Sequence[Mark] = ()


def curves(panels: Sequence[Panel], title: str) -> Figure | None:
    """The panels side by side under one title and one legend; None where no line has a point.

    A label has the same colour in every panel.
    """
    panels = [panel for panel in panels if any(line.points for line in panel.lines)]
    if not panels:
        return None
    figure, first = style.new_axes(title, height_in=PANEL_HEIGHT_IN)
    all_axes = [first] if len(panels) == 1 else style.split(figure, len(panels))
    looks = _looks(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel, looks, 90 // len(panels))
    handles: list[Artist] = [_handle(label, is_theory, looks[label]) for label, is_theory in _labels(panels)]
    style.legend_below(figure, handles, list(looks))
    return figure


Look = tuple[str, str, float]


def _labels(panels: Sequence[Panel]) -> list[tuple[str, bool]]:
    found = {line.label: line.is_theory for panel in panels for line in panel.lines if line.points}
    return list(found.items())


def _looks(panels: Sequence[Panel]) -> dict[str, Look]:
    """Colour, marker and marker scale by label."""
    colours, markers = style.ARM_COLOURS, style.ARM_MARKERS
    return {
        label: (colours[index % len(colours)], *markers[index % len(markers)])
        for index, (label, _) in enumerate(_labels(panels))
    }


def _handle(label: str, is_theory: bool, look: Look) -> Line2D:
    colour, marker, scale = look
    return Line2D([], [], color=colour, **_line_style(is_theory, marker, scale))


def _line_style(is_theory: bool, marker: str, scale: float) -> dict[str, Any]:
    if is_theory:
        return {"linestyle": "--", "linewidth": 1.8}
    return {"linestyle": "-", "linewidth": 2, "marker": marker, "markersize": 7 * scale}


def _draw(axes: Axes, panel: Panel, looks: dict[str, Look], x_characters: int) -> None:
    for line in panel.lines:
        if not line.points:
            continue
        colour, marker, scale = looks[line.label]
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs,
            ys,
            color=colour,
            zorder=3.5 if line.is_theory else 3,
            **_line_style(line.is_theory, marker if len(xs) <= MOST_MARKERS else "", scale),
        )
        for name, point in zip(line.names, line.points, strict=bool(line.names)):
            _write_above(axes, name, point, is_left=ys[-1] >= ys[0])
        if line.spread is not None:
            low, high = zip(*line.spread, strict=True)
            axes.fill_between(xs, low, high, color=style.lighter(colour, 0.7), linewidth=0, zorder=1)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        _set_x_ticks(axes, panel, x_characters)
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_y_subs(panel)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))
    for mark in panel.marks:
        axes.plot(*mark.at, "o", markersize=14, markerfacecolor="none", markeredgecolor=style.DARK, zorder=4)
        axes.annotate(
            mark.text,
            mark.at,
            (-4, 12),
            textcoords="offset points",
            ha="right",
            fontsize=style.FONT_PT,
            color=style.DARK,
        )
    style.label_axes(axes, panel.x_label, panel.y_label, x_characters)


def _write_above(axes: Axes, text: str, point: tuple[float, float], is_left: bool) -> None:
    axes.annotate(
        text,
        point,
        (-6 if is_left else 6, 5),
        textcoords="offset points",
        ha="right" if is_left else "left",
        fontsize=style.FONT_PT,
        color=style.DARK,
        zorder=5,
    )


def _set_x_ticks(axes: Axes, panel: Panel, characters: int) -> None:
    """At measured points, and at the end of a theory that goes further: from the right, while there is room."""
    measured = {x for line in panel.lines if not line.is_theory for x, _ in line.points if x > 0}
    if not measured:
        return
    every = sorted({x for line in panel.lines for x, _ in line.points if x > 0})
    # So many labels of the longest one's length, each with a space, fit below.
    most = characters / (max(len(style.number(x)) for x in every) + 1)
    apart = math.log(every[-1] / every[0]) / most
    ticks = [every[-1]]
    for x in sorted(measured, reverse=True):
        if math.log(ticks[-1] / x) >= apart:
            ticks.append(x)
    axes.xaxis.set_major_locator(FixedLocator(ticks[::-1]))
    axes.xaxis.set_minor_locator(NullLocator())


def _y_subs(panel: Panel) -> tuple[float, ...]:
    """Which multiples of powers of ten are ticks: over many decades the powers alone."""
    ys = [y for line in panel.lines for _, y in line.points]
    return (1.0,) if max(ys) > MOST_LABELLED_RATIO * min(ys) else (1.0, 2.0, 5.0)
