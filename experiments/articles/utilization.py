"""What a utilization counter reads while the same pass runs again and again: busy is not the same as computing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from experiments.articles.timing import wait
from experiments.measure import no_garbage_collection

# A GPU's counter covers up to a second that has passed.
SETTLING_S = 1.0
SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True)
class Utilization:
    """`counter` names what was read; `busy_frac` is None where it can't be read here. `pass_ms` is the mean pass."""

    counter: str
    busy_frac: float | None
    pass_ms: float


def utilization(
    work: Callable[[], object], device: torch.device, threads: int, seconds: float = 2.5
) -> Utilization:
    """Run `work` for so long. On a CPU: processor time of this process by that of `threads` cores."""
    samples: list[float] = []
    with no_garbage_collection(), torch.inference_mode():
        work()  # prepares what is prepared once
        wait(device)
        began_s, busy_began_s = time.perf_counter(), time.process_time()
        count, sampled_s, now_s = 0, began_s + SETTLING_S, began_s
        while now_s - began_s < seconds:
            work()
            wait(device)
            count, now_s = count + 1, time.perf_counter()
            if device.type == "cuda" and now_s - sampled_s >= SAMPLE_EVERY_S:
                samples += _cuda_busy(device)
                sampled_s = now_s
        busy_s = time.process_time() - busy_began_s
    pass_ms = 1e3 * (now_s - began_s) / count
    if device.type == "cuda":
        return Utilization("GPU utilization", statistics.median(samples) if samples else None, pass_ms)
    cores = "the core" if threads == 1 else f"{threads} cores"
    return Utilization(f"CPU utilization of {cores}", busy_s / (now_s - began_s) / threads, pass_ms)


def _cuda_busy(device: torch.device) -> list[float]:
    """Share of the last moments in which a kernel ran, as nvidia-smi shows it; empty where it can't be asked."""
    with suppress(ModuleNotFoundError, RuntimeError):
        return [torch.cuda.utilization(device) / 100]
    return []
