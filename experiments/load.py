"""What else the machine did while something was measured: processor time that was not ours."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

# Services in the background stay below this; a busy neighbour takes a whole core.
MOST_FOREIGN_CORES = 0.15


@dataclass(frozen=True)
class ForeignLoad:
    """Cores that other processes, or the host of a virtual machine, kept busy on average.

    Counted on the cores that this process may run on; on a large host, pin the run to see only those.
    """

    cores: float

    @property
    def is_noisy(self) -> bool:
        return self.cores > MOST_FOREIGN_CORES


class LoadMeter:
    """Starts when made; `read` gives the load since then. Children of this process count as others."""

    def __init__(self) -> None:
        self._began = _counters()

    def read(self) -> ForeignLoad:
        wall_s, busy_s, own_s = (now - then for now, then in zip(_counters(), self._began, strict=True))
        return ForeignLoad(max(0.0, (busy_s - own_s) / wall_s) if wall_s > 0 else 0.0)


def _counters() -> tuple[float, float, float]:
    """Seconds: of the wall clock, of busy time (stolen time included) on the cores we may use, of our own."""
    every_core = psutil.cpu_times(percpu=True)
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(len(every_core)))
    busy = sum(_busy_s(times) for core, times in enumerate(every_core) if core in ours)
    return time.monotonic(), busy, time.process_time()


def _busy_s(times: Any) -> float:
    return sum(getattr(times, kind, 0.0) for kind in ("user", "system", "irq", "softirq", "steal"))
