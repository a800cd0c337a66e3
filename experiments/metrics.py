"""Metrics as pure functions of traces. Names and definitions are a contract (README, "How each number is measured").

Times come in as seconds of the trace's clock and leave as milliseconds; a metric without data is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq

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
        **_stats("latency/ttft_ms", [request.ttft_ms for request in requests], "p50", "p90", "mean", "n"),
        **_stats("latency/itl_ms", itl, "p50", "p90", "p99", "max", "mean", "n"),
        **_stats("latency/tpot_ms", tpot, "p50", "mean", "n"),
        **_stats("latency/step_gap_ms", gaps, "p50", "p99", "max", "n"),
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
    first_reads = [event for trace in traces for event in prompt_reads(trace)]
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

    `acceptance_rate` is a ratio of sums, `acceptance_rate_judged` that of the draft tokens behind no rejected one.
    `accept_pos_<i>` is the share of steps that drafted at least i tokens in which the i-th was accepted,
    `accept_cond_<i>` the same share of those in which the one before it was. Times are of all steps, also of those that
    drafted nothing, whose target pass is a plain one: draft and verify times are measured as such, overhead is what a
    step took beyond the two, which lie within it.
    """
    steps = _speculative_steps(traces)
    if not steps:
        return {}
    by_position = acceptance_by_position(traces)
    drafted = sum(sum(step.output.drafted) for step in steps)
    accepted = sum(sum(step.output.accepted) for step in steps)
    passes_of_steps = [e for trace in traces for e in trace.passes if e.phase in ("decode", "verify")]
    verify_s = [event.end_s - event.start_s for event in passes_of_steps]
    draft_s = [e.end_s - e.start_s for trace in traces for e in trace.proposals]
    step_s = [step.end_s - step.start_s for step in steps]
    overhead_s = (sum(step_s) - sum(verify_s) - sum(draft_s)) / len(steps)
    return {
        "spec/drafted": drafted,
        "spec/accepted": accepted,
        **({"spec/acceptance_rate": accepted / drafted} if drafted else {}),
        **({"spec/acceptance_rate_judged": judged_acceptance(by_position)} if drafted else {}),
        **{f"spec/accept_pos_{p.position}": p.accepted / p.drafted for p in by_position},
        **{f"spec/accept_cond_{p.position}": p.accepted / p.reached for p in by_position if p.reached},
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


def predicted_speedup(
    acceptance_rate: float, num_drafted: float, draft_cost: float, verify_cost: float
) -> float:
    """Expected speed-up if every draft token were accepted with the same probability, independently.

    Leviathan et al. 2023, theorem 3.8, with a verify pass that need not cost what a plain pass does.

    Args:
        num_drafted: draft tokens per step.
        draft_cost: time to draft one token, in plain decoding steps.
        verify_cost: time of all the rest of a step, in plain decoding steps.
    """
    cost = num_drafted * draft_cost + verify_cost
    if acceptance_rate == 1:
        return (num_drafted + 1) / cost
    return (1 - acceptance_rate ** (num_drafted + 1)) / (1 - acceptance_rate) / cost


def break_even_acceptance(num_drafted: float, draft_cost: float, verify_cost: float) -> float | None:
    """The acceptance rate from which on `predicted_speedup` is above 1; None where even 1 is not enough."""

    def gain(rate: float) -> float:
        return predicted_speedup(rate, num_drafted, draft_cost, verify_cost) - 1

    if gain(1.0) < 0:
        return None
    return 0.0 if gain(0.0) >= 0 else float(brentq(gain, 0.0, 1.0))


def prediction(strategy: Sequence[Trace], plain: Sequence[Trace]) -> dict[str, float]:
    """`spec/predicted_speedup` from measured costs and acceptance, and from which acceptance on it would pay.

    Empty without drafts or plain decode steps.
    """
    found = speculation(strategy)
    drafted = found.get("spec/drafted", 0)
    plain_steps = _decode_steps(plain)
    if not drafted or not plain_steps:
        return {}
    plain_s = sum(step.duration_s for step in plain_steps) / len(plain_steps)
    steps = _speculative_steps(strategy)
    draft_s = sum(event.duration_s for trace in strategy for event in trace.proposals)
    rest_s = (sum(step.duration_s for step in steps) - draft_s) / len(steps)
    row_steps = sum(len(step.output.request_ids) for step in steps)
    per_step = drafted / row_steps
    rate = judged_acceptance(acceptance_by_position(strategy))
    drafting = draft_s / len(steps) / per_step / plain_s
    predicted = {"spec/predicted_speedup": predicted_speedup(rate, per_step, drafting, rest_s / plain_s)}
    break_even = break_even_acceptance(per_step, drafting, rest_s / plain_s)
    return predicted if break_even is None else {**predicted, "spec/break_even_acceptance": break_even}


# A text that ends in a loop: this many tokens at least, this many rounds at least, of at most this many tokens each.
LOOP_TOKENS = 16
LOOP_ROUNDS = 3
LOOP_PERIOD = 32


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Does the text end in a loop: the same few tokens again and again?

    Such output is degenerate and makes any copying drafter look fast.
    """
    text = list(token_ids)
    for period in range(1, LOOP_PERIOD + 1):
        length = max(LOOP_TOKENS, LOOP_ROUNDS * period)
        if length > len(text):
            continue
        tail = text[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


@dataclass(frozen=True)
class PositionAcceptance:
    """Draft position 1, 2, ...: steps that drafted it, those whose earlier drafts all stood, and it was accepted."""

    position: int
    drafted: int
    reached: int
    accepted: int


def acceptance_by_position(traces: Sequence[Trace]) -> list[PositionAcceptance]:
    """Over all rows of all steps; tokens behind a stop or limit are in none of the counts."""
    steps = _decode_steps(traces)
    pairs = [pair for s in steps for pair in zip(s.output.drafted, s.output.accepted, strict=True)]
    deepest = max((drafted for drafted, _ in pairs), default=0)
    return [
        PositionAcceptance(
            position,
            sum(drafted >= position for drafted, _ in pairs),
            sum(drafted >= position and accepted >= position - 1 for drafted, accepted in pairs),
            sum(accepted >= position for _, accepted in pairs),
        )
        for position in range(1, deepest + 1)
    ]


def judged_acceptance(by_position: Sequence[PositionAcceptance]) -> float:
    """Share accepted of the draft tokens that were judged: those behind a rejected one say nothing."""
    return sum(place.accepted for place in by_position) / sum(place.reached for place in by_position)


def _decode_steps(traces: Sequence[Trace]) -> list:
    return [step for trace in traces for step in trace.steps if step.output.phase != "prefill"]


def _speculative_steps(traces: Sequence[Trace]) -> list:
    """All decode steps of a decoder that verified at least once; none of others."""
    steps = _decode_steps(traces)
    return steps if any(step.output.phase == "verify" for step in steps) else []


def prompt_reads(trace: Trace) -> list[PassEvent]:
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
        "mean": lambda: (
            math.fsum(values) / len(values)
        ),  # exact sums: the same samples twice have the same mean
        "max": lambda: float(np.max(values)),
        "n": lambda: float(len(values)),
        "p50": lambda: float(np.percentile(values, 50)),
        "p90": lambda: float(np.percentile(values, 90)),
        "p99": lambda: float(np.percentile(values, 99)),
    }
    enough = [stat for stat in stats if stat != "p99" or len(values) >= MIN_SAMPLES_P99]
    return {f"{name}.{stat}": known[stat]() for stat in enough}
