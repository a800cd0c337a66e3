"""What else the machine did while something was measured: processor time that was not ours."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

# A tenth of a core spent elsewhere is background; a busy neighbour takes one whole, and slows two-thread passes
# many times over.
MOST_FOREIGN_CORES = 0.15


@dataclass(frozen=True)
class ForeignLoad:
    """Cores that other processes, or the host of a virtual machine, kept busy on average."""

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
    """Seconds: of the wall clock, of all cores' busy time (stolen time included), of this process's own."""
    times = psutil.cpu_times()
    busy = times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return time.monotonic(), busy + getattr(times, "steal", 0.0), time.process_time()
