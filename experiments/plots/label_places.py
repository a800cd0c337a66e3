"""Labels beside points, none over another: each tries places around its point and keeps the cheapest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from experiments.plots import style

ANGLES = tuple(2 * math.pi * index / 24 for index in range(24))
DISTANCES_PX = (5, 14, 26, 42, 62, 86, 115, 150)
# Costs: covering a text or a marker is worse than crossing a leader, that is worse than crossing the roof, and that
# is worse than being far.
COVERS, CROSSES, COVERS_LINE, FAR_PER_PX = 10_000, 400, 60, 2
PADDING_PX = 3
# A label further from its point than this is joined to it by a line.
ADJACENT_PX = 12
SWEEPS = 3


@dataclass(frozen=True)
class Label:
    """Text for the point `at` (data coordinates), whose marker has `radius_px`."""

    text: str
    at: tuple[float, float]
    radius_px: float
    colour: style.Colour


def place(axes: Axes, labels: Sequence[Label], texts: Sequence[Bbox], lines: Sequence[Bbox]) -> None:
    """Write the labels into axes whose layout is fixed, away from each other, from all their points, from `texts`,
    and where there is room also from `lines` (both in pixels). Deterministic."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = axes.transData.transform([label.at for label in labels])
    radii = np.array([label.radius_px for label in labels])
    fixed = np.concatenate([_boxes(texts), np.hstack([points - radii[:, None], points + radii[:, None]])])
    sizes = [style.text_box(figure, style.wrap(label.text, 40)) for label in labels]
    candidates = [
        _candidates(point, radius, size.width, size.height)
        for point, radius, size in zip(points, radii, sizes, strict=True)
    ]
    chosen: dict[int, np.ndarray] = {}
    for _ in range(SWEEPS):
        for index, options in enumerate(candidates):
            others = [box for other, box in chosen.items() if other != index]
            taken = np.concatenate([fixed, *(box[None] for box in others)])
            costs = _costs(options, points[index], taken, _boxes(lines), axes.get_window_extent())
            chosen[index] = options[int(np.argmin(costs))]
    for index, label in enumerate(labels):
        _write(axes, label, points[index], chosen[index])


def _boxes(boxes: Sequence[Bbox]) -> np.ndarray:
    return np.array([box.extents for box in boxes]).reshape(-1, 4)


def _candidates(point: np.ndarray, radius: float, width: float, height: float) -> np.ndarray:
    """Boxes `[n, 4]` (x0, y0, x1, y1) around a point, pixels."""
    half = np.array([0.5 * width + PADDING_PX, 0.5 * height])
    centres = [
        point + np.array([math.cos(angle), math.sin(angle)]) * (half + radius + distance)
        for distance in DISTANCES_PX
        for angle in ANGLES
    ]
    return np.array([[*(centre - half), *(centre + half)] for centre in centres])


def _costs(
    options: np.ndarray, point: np.ndarray, taken: np.ndarray, lines: np.ndarray, axes_box: Bbox
) -> np.ndarray:
    ends = _nearest(options, point)
    outside = (options[:, :2] < axes_box.min).any(1) | (options[:, 2:] > axes_box.max).any(1)
    return (
        COVERS * 10 * outside
        + COVERS * _overlaps(options, taken).sum(1)
        + COVERS_LINE * _overlaps(options, lines).sum(1)
        + CROSSES * _crossed(point, ends, taken)
        + FAR_PER_PX * np.hypot(*(ends - point).T)
    )


def _nearest(options: np.ndarray, point: np.ndarray) -> np.ndarray:
    """The point of each box that is nearest to a point."""
    return np.clip(point, options[:, :2], options[:, 2:])


def _overlaps(options: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Which option `[n]` overlaps which box `[m]`."""
    a, b = options[:, None], taken[None]
    return (np.minimum(a[..., 2:], b[..., 2:]) > np.maximum(a[..., :2], b[..., :2])).all(-1)


def _crossed(point: np.ndarray, ends: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """How many boxes, other than those around the point, the straight line to each end passes."""
    away = taken[~((taken[:, :2] <= point) & (taken[:, 2:] >= point)).all(1)]
    shares = np.linspace(0, 1, 20)[None, :, None]
    along = (point + shares * (ends[:, None] - point))[:, :, None]
    return ((along >= away[:, :2]) & (along <= away[:, 2:])).all(-1).any(1).sum(1)


def _write(axes: Axes, label: Label, point: np.ndarray, box: np.ndarray) -> None:
    to_data = axes.transData.inverted().transform
    end = _nearest(box[None], point)[0]
    if math.dist(end, point) > label.radius_px + ADJACENT_PX:
        axes.plot(*to_data([point, end]).T, color=label.colour, linewidth=0.9, zorder=4.2)
    x, y = to_data(0.5 * (box[:2] + box[2:]))
    axes.text(
        x,
        y,
        style.wrap(label.text, 40),
        ha="center",
        va="center",
        fontsize=style.FONT_PT,
        color=label.colour,
        zorder=6,
    )
