"""How long something takes: warmed, synchronized, repeated; a median with its spread, the first time apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from experiments.measure import no_garbage_collection

Clock = Callable[[], float]
# Between these, as many as fit into the budget.
LEAST_SAMPLES, MOST_SAMPLES = 3, 15
BUDGET_S = 1.5


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, the quartiles, and the first time, which `count` does not include."""

    median_ms: float
    low_ms: float
    high_ms: float
    count: int
    first_ms: float

    @staticmethod
    def of(samples_ms: Sequence[float], first_ms: float | None = None) -> Timing:
        """Of samples; `first_ms` is one of before that, by default the first of them, which is then left out."""
        if first_ms is None and len(samples_ms) > 1:
            first_ms, *samples_ms = samples_ms
        low, median, high = np.percentile(samples_ms, (25, 50, 75))
        first = samples_ms[0] if first_ms is None else first_ms
        return Timing(float(median), float(low), float(high), len(samples_ms), first)

    def per(self, count: float) -> float:
        """Of `count` things in this time, per second."""
        return 1e3 * count / self.median_ms

    def __str__(self) -> str:
        return f"{_digits(self.median_ms)} [{_digits(self.low_ms)}, {_digits(self.high_ms)}]"


def repeated(
    work: Callable[[], object],
    device: torch.device,
    afterwards: Callable[[], object] = lambda: None,
    *,
    budget_s: float = BUDGET_S,
    least: int = LEAST_SAMPLES,
    most: int = MOST_SAMPLES,
    clock: Clock = time.perf_counter,
) -> Timing:
    """Time `work` again and again; `afterwards`, which undoes it, is not timed. Once more than what is counted."""
    samples_ms: list[float] = []
    with no_garbage_collection(), torch.inference_mode():
        while len(samples_ms) <= most and (len(samples_ms) <= least or sum(samples_ms) < 1e3 * budget_s):
            start_s = clock()
            work()
            wait(device)
            samples_ms.append(1e3 * (clock() - start_s))
            afterwards()
    return Timing.of(samples_ms)


def with_quartiles(samples_ms: Sequence[float]) -> str:
    """Median and quartiles of all samples, as a `Timing` shows them."""
    return str(Timing.of(samples_ms, first_ms=samples_ms[0]))


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
