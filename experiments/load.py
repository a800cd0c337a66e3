"""What else the machine did while something was measured: processor time that was not ours."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from experiments.clocks import usable_cores

# Services in the background stay below this; a busy neighbour takes a whole core. Not relative to the cores
# that we leave idle: a neighbour there still takes memory bandwidth, shared cache and clock speed.
MOST_FOREIGN_CORES = 0.15


@dataclass(frozen=True)
class ForeignLoad:
    """Cores that other processes, or the host of a virtual machine, kept busy on average.

    Counted on the cores that this process may run on; on a large host, pin the run to see only those.
    `own_cores` is what this process kept busy. The load averages are the system's 1-minute ones when
    measuring began and ended: threads that ran or waited for a core or a disk, on all cores, ours included.
    None is unknown.
    """

    cores: float
    own_cores: float | None = None
    load_average_before: float | None = None
    load_average_after: float | None = None

    @property
    def is_noisy(self) -> bool:
        return self.cores > MOST_FOREIGN_CORES

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, with the verdict and its threshold."""
        return {
            "foreign_cores": self.cores,
            "own_cores": self.own_cores,
            "load_average_before": self.load_average_before,
            "load_average_after": self.load_average_after,
            "most_foreign_cores": MOST_FOREIGN_CORES,
            "is_noisy": self.is_noisy,
        }


class LoadMeter:
    """Starts when made; `read` gives the load since then. Children of this process count as others."""

    def __init__(self) -> None:
        self._load_average = _load_average()
        self._began = _counters()

    def read(self) -> ForeignLoad:
        wall_s, busy_s, own_s = (now - then for now, then in zip(_counters(), self._began, strict=True))
        return ForeignLoad(
            cores=max(0.0, (busy_s - own_s) / wall_s) if wall_s > 0 else 0.0,
            own_cores=own_s / wall_s if wall_s > 0 else 0.0,
            load_average_before=self._load_average,
            load_average_after=_load_average(),
        )


def _counters() -> tuple[float, float, float]:
    """Seconds: of the wall clock, of busy time (stolen time included) on the cores we may use, of our own."""
    every_core = psutil.cpu_times(percpu=True)
    ours = usable_cores()
    busy = sum(_busy_s(times) for core, times in enumerate(every_core) if core in ours)
    return time.monotonic(), busy, time.process_time()


def _load_average() -> float | None:
    """Of the last minute, None where the system has none."""
    with suppress(OSError):
        return round(psutil.getloadavg()[0], 2)
    return None


def _busy_s(times: Any) -> float:
    # Niced work counts too: it waits for us to yield a core, but not for the memory bus.
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
