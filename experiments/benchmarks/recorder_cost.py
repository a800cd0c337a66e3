"""python -m experiments.benchmarks.recorder_cost : what timing a step costs, as a share of the step.

The cost of an event is that of calling a timed wrapper around a runner that does nothing, less the bare call. How many
events a step has, and how long it takes, is measured on a speculative run of the bundled model (a draft model has the
most events per step).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.config import compose_run
from experiments.measured_point import measure_point
from experiments.point import prepare
from experiments.recorder import Recorder
from experiments.timed import TARGET_PHASES, TimedRunner

CALLS = 20000
TRIES = 5


class _IdleRunner:
    """The runner protocol, as far as a decode pass needs it, doing nothing."""

    device = torch.device("cpu")
    prefill_chunk = None
    lengths = (100,)

    def __init__(self) -> None:
        self._logits = torch.zeros(1, 1)

    def decode(self, token_ids: torch.Tensor, counts: Any = None) -> torch.Tensor:
        return self._logits


def event_us() -> float:
    """Microseconds that the recorder adds to a pass: two clock readings and one stored event."""
    token, idle = torch.zeros(1, 1, dtype=torch.long), _IdleRunner()
    recorder = Recorder(time.perf_counter, CALLS)
    timed = TimedRunner(idle, recorder, TARGET_PHASES)  # type: ignore[arg-type]

    def calls_s(decode: Callable[[torch.Tensor], torch.Tensor]) -> float:
        recorder.clear()
        start_s = time.perf_counter()
        for _ in range(CALLS):
            decode(token)
        return time.perf_counter() - start_s

    differences = [calls_s(timed.decode) - calls_s(idle.decode) for _ in range(TRIES)]
    return 1e6 * sorted(differences)[TRIES // 2] / CALLS


def main() -> int:
    overrides = ["strategy=specdec", "workload.limit=4", "measure.aa=false", "measure.memory=false"]
    result = measure_point(prepare(compose_run([*overrides, "measure.ceilings=skip"])))
    cost_us = event_us()
    print(f"{cost_us:.2f} us per event (median of {TRIES} x {CALLS} calls)")
    for arm in result.point.arms.distinct:
        traces = result.traces_of(arm)
        steps = sum(len(trace.steps) for trace in traces)
        events = steps + sum(len(trace.passes) + len(trace.proposals) for trace in traces)
        step_ms = 1e3 * sum(step.duration_s for trace in traces for step in trace.steps) / steps
        share = 100 * cost_us * events / steps / (1e3 * step_ms)
        print(
            f"{arm.name}: {events / steps:.2f} events per step of {step_ms:.1f} ms (mean): "
            f"recording is {share:.3f} % of a step"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
