"""A line through measured times, for what has a fixed part and one that grows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def line_through(times_ms: Mapping[int, float] | Mapping[float, float]) -> tuple[float, float]:
    """Offset and slope of the line whose relative errors have the least squares; a constant through fewer than two."""
    places = np.array(list(times_ms), dtype=float)
    ms = np.array(list(times_ms.values()))
    if len(places) < 2:
        return float(ms[0]), 0.0
    slope, offset = np.polyfit(places, ms, 1, w=1 / ms)
    return float(offset), float(slope)
