"""One request measured alone and whole: its steps and passes, and how long it took on a clock outside of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate

from experiments.measure import no_garbage_collection, record_steps
from experiments.metrics import TARGET_PHASES, RequestMetrics, request_metrics
from experiments.timed import time_parts
from experiments.trace import PassEvent, RequestTimeline, StepEvent, Trace, timelines
from specdec.decoding.base import Decoder
from specdec.types import Request


@dataclass(frozen=True)
class Anatomy:
    """One run of the request, and how long it took on a clock outside of everything that was recorded."""

    trace: Trace
    outer_ms: float

    @property
    def timeline(self) -> RequestTimeline:
        (found,) = timelines(self.trace)
        return found

    @property
    def metrics(self) -> RequestMetrics:
        return request_metrics(self.timeline)

    @property
    def later_tokens(self) -> int:
        """Those that steps brought: all but the prefill's."""
        return self.timeline.num_tokens - self.timeline.commit_sizes[0]

    @property
    def sum_ms(self) -> float:
        """TTFT + (n - 1) x ITL."""
        return self.metrics.ttft_ms + self.later_tokens * (self.metrics.tpot_ms or 0.0)

    @property
    def error_frac(self) -> float:
        return self.sum_ms / self.outer_ms - 1

    @property
    def positions_ms(self) -> list[tuple[int, float]]:
        """Each step by the output position of its last token."""
        ends = accumulate(self.timeline.commit_sizes)
        return [(end, 1e3 * step.duration_s) for end, step in zip(ends, self.trace.steps, strict=True)]

    @property
    def target_passes(self) -> list[list[PassEvent]]:
        """The target's passes within each step."""
        return [self._passes_of(step) for step in self.trace.steps]

    def _passes_of(self, step: StepEvent) -> list[PassEvent]:
        return [
            event
            for event in self.trace.passes
            if event.phase in TARGET_PHASES and step.start_s <= event.start_s < step.end_s
        ]


def anatomies(decoder: Decoder, request: Request, times: int) -> list[Anatomy]:
    """The same request again and again."""
    recorder = time_parts(decoder, time.perf_counter)
    found = []
    try:
        for repeat in range(times):
            recorder.clear()
            with no_garbage_collection():
                outer_s = time.monotonic()
                span_s = record_steps(decoder, [request], recorder)
                outer_s = time.monotonic() - outer_s
            found.append(Anatomy(recorder.trace("the request", repeat, 0, *span_s), 1e3 * outer_s))
    finally:
        recorder.restore()
    return found
