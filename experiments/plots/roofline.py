"""Passes under the machine's roofline (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from experiments.plots import style
from experiments.plots.label_places import Label, place
from experiments.roofline import Ceilings, RooflinePoint

MARKER_PT = 9.0
# Points closer than this cover each other: those below are drawn larger, so that they stand out as rings, and points
# of the same kind share a label.
COINCIDE_PX = 10
RING_PT = 4.5
# Axes of fewer decades have room for more than one tick each.
FEW_DECADES = 3.3


def roofline(points: Mapping[str, Sequence[RooflinePoint]], ceilings: Ceilings, title: str) -> Figure | None:
    """Arithmetic intensity and achieved rate of each arm's passes, below what the machine was measured to do.

    Colour and shape tell the arm, the text beside a point its kind of pass. None for no points.
    """
    drawn = {arm: found for arm, found in points.items() if found}
    if not drawn:
        return None
    figure, axes = style.new_axes(title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _set_limits(axes, [point for found in drawn.values() for point in found], ceilings)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        subs = (1.0, 2.0, 5.0) if math.log10(high / low) < FEW_DECADES else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))
    style.label_axes(axes, "arithmetic intensity, operations per byte moved", "achieved rate, GFLOP/s")
    _draw_roof(axes, ceilings)
    handles: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=MARKER_PT * scale)
        for colour, (marker, scale) in _looks(len(drawn))
    ]
    style.legend_below(figure, handles, list(drawn))
    style.fix_layout(figure)
    labels = _draw_points(axes, drawn)
    place(
        axes,
        [*_ridge_label(axes, ceilings), *labels],
        _roof_texts(axes, ceilings),
        _roof_boxes(axes, ceilings),
    )
    return figure


def ridge(ceilings: Ceilings) -> float:
    """The intensity (operations per byte) from which on arithmetic, not memory, is the limit."""
    return ceilings.gemm_gflop_s / ceilings.read_gb_s


def _looks(num_arms: int) -> list[tuple[str, tuple[str, float]]]:
    """Colour and marker (shape, scale) of each arm."""
    colours, markers = style.ARM_COLOURS, style.ARM_MARKERS
    return [(colours[index % len(colours)], markers[index % len(markers)]) for index in range(num_arms)]


def _set_limits(axes: Axes, points: Sequence[RooflinePoint], ceilings: Ceilings) -> None:
    """All points and the ridge, with enough of both roofs beside it to write on."""
    intensities = [point.operations_per_byte for point in points]
    rates = [point.gflop_s for point in points]
    knee, roof = ridge(ceilings), ceilings.gemm_gflop_s
    axes.set_xlim(min(*intensities, knee / 4) / 2.5, max(*intensities, knee * 4) * 2.5)
    axes.set_ylim(min(*rates, roof / 10) / 2.5, max(*rates, roof) * 3)


def _draw_roof(axes: Axes, ceilings: Ceilings) -> None:
    knee, roof = ridge(ceilings), ceilings.gemm_gflop_s
    left, right = axes.get_xlim()
    axes.plot([left, knee, right], [left * ceilings.read_gb_s, roof, roof], color=style.DARK, linewidth=1.8)
    axes.plot([knee], [roof], "o", color="white", markeredgecolor=style.DARK, markersize=7, zorder=3)


def _roof_texts(axes: Axes, ceilings: Ceilings) -> list[Bbox]:
    """Write both ceilings on the roof; the boxes that the texts cover, pixels."""
    slope = f"memory: {style.number(ceilings.read_gb_s)} GB/s"
    flat = f"matrix products: {style.number(ceilings.gemm_gflop_s)} GFLOP/s"
    (start, knee), gap_px = _slope_px(axes, ceilings), 8
    angle = math.atan2(knee[1] - start[1], knee[0] - start[0])
    up = (-math.sin(angle), math.cos(angle))
    middle = [0.5 * (a + b) + gap_px * c for a, b, c in zip(start, knee, up, strict=True)]
    x, y = axes.transData.inverted().transform(middle)
    slanted = axes.text(
        x, y, slope, ha="center", va="bottom", rotation=math.degrees(angle), rotation_mode="anchor"
    )
    level = axes.annotate(
        flat,
        (axes.get_xlim()[1], ceilings.gemm_gflop_s),
        (-gap_px, gap_px),
        textcoords="offset pixels",
        ha="right",
        va="bottom",
    )
    for text in (slanted, level):
        text.set(fontsize=style.FONT_PT, color=style.DARK)
    figure = axes.get_figure(root=True)
    assert figure is not None
    size = style.text_box(figure, slope)
    return [level.get_window_extent(), *_along(middle, angle, up, size)]


def _along(middle: Sequence[float], angle: float, up: tuple[float, float], size: Bbox) -> list[Bbox]:
    """Squares that cover a slanted text; its own box would cover half of the picture."""
    count = math.ceil(size.width / size.height)
    boxes = []
    for index in range(count):
        along = (index + 0.5 - count / 2) * size.height
        x = middle[0] + along * math.cos(angle) + 0.5 * size.height * up[0]
        y = middle[1] + along * math.sin(angle) + 0.5 * size.height * up[1]
        boxes.append(Bbox.from_bounds(x - size.height / 2, y - size.height / 2, size.height, size.height))
    return boxes


def _slope_px(axes: Axes, ceilings: Ceilings) -> tuple[tuple[float, float], tuple[float, float]]:
    """The visible part of the slanted roof, pixels."""
    left = max(axes.get_xlim()[0], axes.get_ylim()[0] / ceilings.read_gb_s)
    ends = [(left, left * ceilings.read_gb_s), (ridge(ceilings), ceilings.gemm_gflop_s)]
    (x0, y0), (x1, y1) = axes.transData.transform(ends)
    return (x0, y0), (x1, y1)


def _roof_boxes(axes: Axes, ceilings: Ceilings) -> list[Bbox]:
    """Small boxes along the roof's lines, pixels."""
    start, knee = _slope_px(axes, ceilings)
    ends = [(start, knee), (knee, (axes.get_window_extent().x1, knee[1]))]
    boxes = []
    for (x0, y0), (x1, y1) in ends:
        count = max(1, round(math.hypot(x1 - x0, y1 - y0) / 10))
        for index in range(count + 1):
            x, y = x0 + (x1 - x0) * index / count, y0 + (y1 - y0) * index / count
            boxes.append(Bbox.from_bounds(x - 4, y - 4, 8, 8))
    return boxes


def _ridge_label(axes: Axes, ceilings: Ceilings) -> list[Label]:
    at = (ridge(ceilings), ceilings.gemm_gflop_s)
    return [
        Label(
            f"ridge: {style.number(float(f'{at[0]:.3g}'))} operations per byte", at, 7.0, to_rgb(style.DARK)
        )
    ]


def _draw_points(axes: Axes, drawn: Mapping[str, Sequence[RooflinePoint]]) -> list[Label]:
    """A marker per point; the labels that are to stand beside them."""
    looks = [look for look, found in zip(_looks(len(drawn)), drawn.values(), strict=True) for _ in found]
    points = [point for found in drawn.values() for point in found]
    pixels = axes.transData.transform([(point.operations_per_byte, point.gflop_s) for point in points])
    labels: list[Label] = []
    for index, (point, (colour, (marker, scale))) in enumerate(zip(points, looks, strict=True)):
        covering = sum(math.dist(pixels[index], other) < COINCIDE_PX for other in pixels[index + 1 :])
        size_pt = MARKER_PT + RING_PT * covering
        at = (point.operations_per_byte, point.gflop_s)
        axes.plot(
            *at,
            marker,
            color=colour,
            markersize=size_pt * scale,
            markeredgecolor="white",
            zorder=5 - 0.01 * size_pt,
        )
        labels.append(Label(point.label, at, 0.5 * size_pt * style.DPI / 72, style.darker(colour)))
    return _share(labels, pixels)


def _share(labels: Sequence[Label], pixels: np.ndarray) -> list[Label]:
    """One label, in no arm's colour, where several arms have the same kind of pass at the same place."""
    shared: list[Label] = []
    left = list(range(len(labels)))
    while left:
        group = [left.pop(0)]
        for index in group:  # grows: neighbours of neighbours belong to it
            near = [
                other
                for other in left
                if labels[other].text == labels[index].text
                and math.dist(pixels[other], pixels[index]) < COINCIDE_PX
            ]
            group += near
            left = [other for other in left if other not in near]
        first = labels[group[0]]
        colour = first.colour if len(group) == 1 else to_rgb(style.DARK)
        radius_px = max(labels[index].radius_px for index in group)
        shared.append(Label(first.text, first.at, radius_px, colour))
    return shared
