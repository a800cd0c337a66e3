"""Metrics as pure functions of traces. Names and definitions are a contract (README, "How each number is measured").

Times come in as seconds of the trace's clock and leave as milliseconds; a metric without data is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.trace import PassEvent, RequestTimeline, Trace, timelines

METRICS_VERSION = "1"
TARGET_PHASES = ("prefill", "decode", "verify")
# Below this many samples the 99th percentile is little else than the largest one.
MIN_SAMPLES_P99 = 100


@dataclass(frozen=True)
class RequestMetrics:
    """One request; all in milliseconds. `tpot_ms` is None when only the first commit's tokens were written."""

    ttft_ms: float
    step_gaps_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    tpot_ms: float | None
    total_ms: float


def request_metrics(timeline: RequestTimeline) -> RequestMetrics:
    """TTFT, the gaps between commits, the inter-token latencies (tokens of one block share its gap), and TPOT."""
    times, sizes = timeline.commit_times_s, timeline.commit_sizes
    gaps = tuple(1e3 * (later - earlier) for earlier, later in pairwise(times))
    itl = tuple(gap / size for gap, size in zip(gaps, sizes[1:], strict=True) for _ in range(size))
    later_tokens = timeline.num_tokens - sizes[0]
    return RequestMetrics(
        ttft_ms=1e3 * (times[0] - timeline.admitted_s),
        step_gaps_ms=gaps,
        itl_ms=itl,
        tpot_ms=1e3 * (times[-1] - times[0]) / later_tokens if later_tokens else None,
        total_ms=1e3 * (times[-1] - timeline.admitted_s),
    )


def latency(traces: Sequence[Trace]) -> dict[str, float]:
    """`latency/...` over all requests of one arm's traces."""
    found = [timeline for trace in traces for timeline in timelines(trace)]
    requests = [request_metrics(timeline) for timeline in found]
    itl = [value for request in requests for value in request.itl_ms]
    gaps = [value for request in requests for value in request.step_gaps_ms]
    tpot = [request.tpot_ms for request in requests if request.tpot_ms is not None]
    return {
        **_stats("latency/ttft_ms", [request.ttft_ms for request in requests], "p50", "p90", "mean"),
        **_stats("latency/itl_ms", itl, "p50", "p90", "p99", "max", "mean"),
        **_stats("latency/tpot_ms", tpot, "p50", "mean"),
        **_stats("latency/step_gap_ms", gaps, "p50", "p99", "max"),
        **_stats("latency/queue_ms", [1e3 * timeline.queued_s for timeline in found], "mean"),
        **_stats("latency/total_s", [request.total_ms / 1e3 for request in requests], "mean"),
    }


def throughput(traces: Sequence[Trace]) -> dict[str, float]:
    """`throughput/...`: per request, over all rows while decoding, and of prefill passes."""
    rates = []
    for trace in traces:
        for timeline in timelines(trace):
            tpot_ms = request_metrics(timeline).tpot_ms
            if tpot_ms:
                rates.append(1e3 / tpot_ms)
    decoded = sum(sum(map(len, step.output.committed)) for step in _decode_steps(traces))
    decode_s = sum(step.end_s - step.start_s for step in _decode_steps(traces))
    first_reads = [event for trace in traces for event in _first_prefills(trace)]
    prefill_s = sum(event.end_s - event.start_s for event in first_reads)
    prefilled = sum(sum(event.counts) for event in first_reads)
    return {
        **_stats("throughput/decode_tok_s_request", rates, "mean"),
        **({"throughput/decode_tok_s_aggregate": decoded / decode_s} if decode_s else {}),
        **({"throughput/prefill_tok_s": prefilled / prefill_s} if prefill_s else {}),
    }


def passes(traces: Sequence[Trace]) -> dict[str, float]:
    """`passes/...`: forward passes of the target and of the draft model, prefill included."""
    events = [event for trace in traces for event in trace.passes]
    target = sum(event.num_passes for event in events if event.phase in TARGET_PHASES)
    return {"passes/target": target, "passes/draft": sum(event.num_passes for event in events) - target}


def tokens_per_pass(traces: Sequence[Trace]) -> dict[str, float]:
    """`spec/tokens_per_pass`: tokens that a request gains from a target pass after its prefill; 1 without drafts.

    Rows of a batch share a pass: each row of it counts.
    """
    steps = _decode_steps(traces)
    row_steps = sum(len(step.output.request_ids) for step in steps)
    committed = sum(sum(map(len, step.output.committed)) for step in steps)
    return {"spec/tokens_per_pass": committed / row_steps} if row_steps else {}


def speculation(traces: Sequence[Trace]) -> dict[str, float]:
    """`spec/...`; empty for traces without a verify pass.

    `acceptance_rate` is a ratio of sums. `accept_pos_<i>` is the share of steps that drafted at least i tokens in
    which the i-th was accepted. Draft and verify times are measured as such; overhead is what a step took
    beyond the two, which lie within it.
    """
    steps = [step for step in _decode_steps(traces) if step.output.phase == "verify"]
    if not steps:
        return {}
    pairs = [pair for s in steps for pair in zip(s.output.drafted, s.output.accepted, strict=True)]
    drafted, accepted = sum(d for d, _ in pairs), sum(a for _, a in pairs)
    verify_s = [e.end_s - e.start_s for trace in traces for e in trace.passes if e.phase == "verify"]
    draft_s = [e.end_s - e.start_s for trace in traces for e in trace.proposals]
    step_s = [step.end_s - step.start_s for step in steps]
    overhead_s = (sum(step_s) - sum(verify_s) - sum(draft_s)) / len(steps)
    return {
        "spec/drafted": drafted,
        "spec/accepted": accepted,
        **({"spec/acceptance_rate": accepted / drafted} if drafted else {}),
        **_acceptance_by_position(pairs),
        **_stats("spec/draft_ms", [1e3 * value for value in draft_s], "mean"),
        **_stats("spec/verify_ms", [1e3 * value for value in verify_s], "mean"),
        "spec/overhead_ms.mean": 1e3 * overhead_s,
    }


def arm_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Every metric that one arm's traces give."""
    return {
        **latency(traces),
        **throughput(traces),
        **tokens_per_pass(traces),
        **speculation(traces),
        **passes(traces),
    }


def is_repetitive(token_ids: Sequence[int], max_period: int = 8, min_tokens: int = 24) -> bool:
    """Does the text end in a loop: at least `min_tokens` tokens of a period of at most `max_period`?

    Such output is degenerate and makes any copying drafter look fast.
    """
    tail = list(token_ids[-min_tokens:])
    if len(tail) < min_tokens:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, max_period + 1))


def _acceptance_by_position(pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    deepest = max((drafted for drafted, _ in pairs), default=0)
    rates = {}
    for position in range(1, deepest + 1):
        reached = [accepted >= position for drafted, accepted in pairs if drafted >= position]
        rates[f"spec/accept_pos_{position}"] = sum(reached) / len(reached)
    return rates


def _decode_steps(traces: Sequence[Trace]) -> list:
    return [step for trace in traces for step in trace.steps if step.output.phase != "prefill"]


def _first_prefills(trace: Trace) -> list[PassEvent]:
    """Prefill passes of prompts, not those with which `no_cache` decodes."""
    spans = [(step.start_s, step.end_s) for step in trace.steps if step.output.phase == "prefill"]
    return [
        event
        for event in trace.passes
        if event.phase == "prefill" and any(start <= event.start_s < end for start, end in spans)
    ]


def _stats(name: str, values: Sequence[float], *stats: str) -> dict[str, float]:
    if not values:
        return {}
    known = {
        "mean": lambda: float(np.mean(values)),
        "max": lambda: float(np.max(values)),
        "p50": lambda: float(np.percentile(values, 50)),
        "p90": lambda: float(np.percentile(values, 90)),
        "p99": lambda: float(np.percentile(values, 99)),
    }
    enough = [stat for stat in stats if stat != "p99" or len(values) >= MIN_SAMPLES_P99]
    return {f"{name}.{stat}": known[stat]() for stat in enough}
