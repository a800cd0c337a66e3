"""The meter measures itself: on a simulated clock every metric of `arm_metrics` equals a value worked out by hand.

Target: 1/16 s per prompt token, 1 s a decode pass, 1.25 s a verify pass; the draft model takes a quarter of that.
Each commit to a cache (after a decode pass one, after a verify pass one of each model) takes 1/64 s. Expected values
are exact rationals, turned into floats once, and compared with ==.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any

import pytest
import toy_clock
import toy_engine
from toy_clock import Clock, SimulatedRunner
from toy_engine import LawOf, build_decoder

from experiments import metrics, roofline, statistics, timed
from experiments.measure import measure
from experiments.recorder import Recorder
from experiments.roofline import Ceilings, ModelCost
from experiments.trace import PassEvent, RequestTimeline, Trace, timelines
from specdec.decoding.base import Decoder
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.draws import BlockDraws
from specdec.progress import Row
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Request, SamplingParams, StepOutput

VOCAB, STOP = 9, 7  # token 8 is what arbitrary logits say
PROMPT_TOKENS = (4, 8, 24)
ANSWERS = (
    (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6),
    (2, 3, 4, 5, 6, 1, 2, 3, STOP, 4, 5, 6),
    (3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2),
)
# Answer positions at which the draft model is wrong.
WRONG: tuple[set[int], ...] = ({6}, {1, 2}, {2, 3, 4})
NEVER_WRONG: tuple[set[int], ...] = (set(), set(), set())
LIMITS = (9, 20, 6)
REQUESTS = tuple(
    Request(i, (i,) * n, limit) for i, (n, limit) in enumerate(zip(PROMPT_TOKENS, LIMITS, strict=True))
)
K = 3

READ, DRAFT_READ = Fraction(1, 16), Fraction(1, 64)  # seconds per prompt token
DECODE, VERIFY, DRAFT, COMMIT = Fraction(1), Fraction(5, 4), Fraction(1, 4), Fraction(1, 64)
PLAIN_STEP = DECODE + COMMIT
JUDGE = VERIFY + 2 * COMMIT  # a speculative step beyond its draft passes


def law(wrong: Sequence[set[int]] = NEVER_WRONG) -> LawOf:
    """Greedy: a prompt's first token says whose answer follows; at `wrong` positions another token does."""

    def next_law(text: Sequence[int]) -> list[float]:
        request = text[0]
        position = len(text) - PROMPT_TOKENS[request]
        answer = ANSWERS[request]
        right = answer[position % len(answer)] if position >= 0 else 0
        chosen = 0 if position in wrong[request] else right
        return [float(token == chosen) for token in range(VOCAB)]

    return next_law


class WholeRunner(SimulatedRunner):
    """`scale` holds for commits too."""

    def commit(self, lengths: Sequence[int]) -> None:
        self.clock.now += (self.scale - 1) * toy_clock.OVERHEAD_S
        super().commit(lengths)


def plain(clock: Clock, num_slots: int, scale: float = 1.0) -> Decoder:
    return build_decoder(
        WholeRunner(law(), VOCAB, num_slots, clock, scale), num_slots=num_slots, stop_ids=[STOP]
    )


def speculative(
    clock: Clock, num_slots: int, wrong: Sequence[set[int]] = WRONG, k: int = K, draft_scale: float = 0.25
) -> Decoder:
    draft = SimulatedRunner(law(wrong), VOCAB, num_slots, clock, draft_scale)
    return build_decoder(
        SimulatedRunner(law(), VOCAB, num_slots, clock),
        num_slots=num_slots,
        drafter=DraftModelDrafter(draft, Sampler(SamplingParams())),
        draft_length=k,
        stop_ids=[STOP],
    )


def simulate(num_slots: int, requests: tuple[Request, ...], repeats: int = 1) -> dict[str, list[Trace]]:
    """Both arms, interleaved on one clock, which starts anywhere."""
    clock = Clock()
    clock.now = 100.0
    decoders = {"plain": plain(clock, num_slots), "speculative": speculative(clock, num_slots)}
    found = measure(decoders, [requests], repeats=repeats, warmup=0, clock=clock)
    return {arm: [trace for trace in found if trace.arm == arm] for arm in decoders}


traces_of = cache(simulate)


# --- expected values


def mean(values: Sequence[Fraction]) -> Fraction:
    return total(values) / len(values)


def total(values: Iterable[Fraction]) -> Fraction:
    return sum(values, Fraction(0))


def percentile(values: Sequence[Fraction], percent: int) -> Fraction:
    """Linear between the two nearest, by rank."""
    ordered = sorted(values)
    rank = Fraction(percent * (len(ordered) - 1), 100)
    low = rank.numerator // rank.denominator
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def expected_latency(
    ttft_s: Sequence[Fraction],
    gaps_s: Sequence[Sequence[Fraction]],
    sizes: Sequence[Sequence[int]],
    queue_s: Sequence[Fraction],
) -> dict[str, Fraction]:
    """By request: time to the first token, then each gap and the tokens that came after it."""
    ttft = [1000 * value for value in ttft_s]
    gaps = [1000 * gap for row in gaps_s for gap in row]
    itl = [
        1000 * gap / n
        for row, counts in zip(gaps_s, sizes, strict=True)
        for gap, n in zip(row, counts, strict=True)
        for _ in range(n)
    ]
    tpot = [1000 * total(row) / sum(counts) for row, counts in zip(gaps_s, sizes, strict=True)]
    rates = [1000 / value for value in tpot]
    return {
        "latency/ttft_ms.p50": percentile(ttft, 50),
        "latency/ttft_ms.p90": percentile(ttft, 90),
        "latency/ttft_ms.mean": mean(ttft),
        "latency/ttft_ms.n": Fraction(len(ttft)),
        "latency/itl_ms.p50": percentile(itl, 50),
        "latency/itl_ms.p90": percentile(itl, 90),
        "latency/itl_ms.max": max(itl),
        "latency/itl_ms.mean": mean(itl),
        "latency/itl_ms.n": Fraction(len(itl)),
        "latency/tpot_ms.p50": percentile(tpot, 50),
        "latency/tpot_ms.mean": mean(tpot),
        "latency/tpot_ms.n": Fraction(len(tpot)),
        "latency/step_gap_ms.p50": percentile(gaps, 50),
        "latency/step_gap_ms.max": max(gaps),
        "latency/step_gap_ms.n": Fraction(len(gaps)),
        "latency/queue_ms.mean": 1000 * mean(queue_s),
        "latency/total_s.mean": mean([t + total(row) for t, row in zip(ttft_s, gaps_s, strict=True)]),
        "throughput/decode_tok_s_request.mean": mean(rates),
    }


def check(traces: Sequence[Trace], *expected: dict[str, Fraction]) -> None:
    """All metrics, and no other, exactly."""
    assert metrics.arm_metrics(traces) == {
        name: float(value) for part in expected for name, value in part.items()
    }


# --- every metric, by hand


def test_plain_decoding_one_row() -> None:
    """Request 1 waits for the slot. Both answers: a token from prefill, then 8."""
    check(
        traces_of(1, REQUESTS[:2])["plain"],
        expected_latency(
            ttft_s=[4 * READ, 8 * READ],
            gaps_s=[[PLAIN_STEP] * 8] * 2,
            sizes=[[1] * 8] * 2,
            queue_s=[Fraction(0), 4 * READ + 8 * PLAIN_STEP],
        ),
        {
            "throughput/decode_tok_s_aggregate": 1 / PLAIN_STEP,
            "throughput/prefill_tok_s": 1 / READ,
            "spec/tokens_per_pass": Fraction(1),
            "passes/target": Fraction(2 + 16),
            "passes/draft": Fraction(0),
        },
    )


def test_speculation_one_row() -> None:
    """Request 0 is cut by its limit, request 1 by a stop token within an accepted block."""
    first = [4 * DRAFT_READ + 3 * DRAFT + JUDGE, 3 * DRAFT + JUDGE, DRAFT + JUDGE]  # 1 token left to draft
    second = [8 * DRAFT_READ + 3 * DRAFT + JUDGE, *[3 * DRAFT + JUDGE] * 3]
    drafting = total(first + second) - 7 * JUDGE
    check(
        traces_of(1, REQUESTS[:2])["speculative"],
        expected_latency(
            ttft_s=[4 * READ, 8 * READ],
            gaps_s=[first, second],
            sizes=[[4, 2, 2], [1, 1, 4, 2]],
            queue_s=[Fraction(0), 4 * READ + total(first)],
        ),
        {
            "throughput/decode_tok_s_aggregate": 16 / total(first + second),
            "throughput/prefill_tok_s": 1 / READ,
            "spec/tokens_per_pass": Fraction(16, 7),
            # (drafted, accepted): 3 3, 3 1, 1 1; 3 0, 3 0, 3 3, and 1 1 before the stop token
            "spec/drafted": Fraction(17),
            "spec/accepted": Fraction(9),
            "spec/acceptance_rate": Fraction(9, 17),
            "spec/acceptance_rate_judged": Fraction(9, 7 + 3 + 2),
            "spec/accept_pos_1": Fraction(5, 7),
            "spec/accept_pos_2": Fraction(2, 5),
            "spec/accept_pos_3": Fraction(2, 5),
            "spec/accept_cond_1": Fraction(5, 7),
            "spec/accept_cond_2": Fraction(2, 3),
            "spec/accept_cond_3": Fraction(1),
            "spec/draft_ms.mean": 1000 * drafting / 7,
            "spec/verify_ms.mean": 1000 * VERIFY,
            "spec/overhead_ms.mean": 1000 * 2 * COMMIT,
            "passes/target": Fraction(2 + 7),
            "passes/draft": Fraction(2 + 3 + 3 + 1 + 4 * 3),
        },
    )


def test_plain_decoding_two_rows() -> None:
    """Requests 0 and 1 end with the same step; request 2 then has the slots to itself."""
    check(
        traces_of(2, REQUESTS)["plain"],
        expected_latency(
            ttft_s=[12 * READ, 12 * READ, 24 * READ],
            gaps_s=[[PLAIN_STEP] * 8, [PLAIN_STEP] * 8, [PLAIN_STEP] * 5],
            sizes=[[1] * 8, [1] * 8, [1] * 5],
            queue_s=[Fraction(0), Fraction(0), 12 * READ + 8 * PLAIN_STEP],
        ),
        {
            "throughput/decode_tok_s_aggregate": 21 / (13 * PLAIN_STEP),
            "throughput/prefill_tok_s": 1 / READ,
            "spec/tokens_per_pass": Fraction(1),
            "passes/target": Fraction(3 + 13),
            "passes/draft": Fraction(0),
        },
    )


def test_speculation_two_rows() -> None:
    """Request 2 takes the slot of request 0 while request 1 waits for its prefill; its last step drafts nothing."""
    three = 3 * DRAFT + JUDGE
    joint = [12 * DRAFT_READ + three, three, three]
    undrafted = DECODE + 2 * COMMIT
    alone = [24 * DRAFT_READ + three, 2 * DRAFT + JUDGE, DRAFT + JUDGE, undrafted]
    steps = joint + alone
    read_2 = 24 * READ
    check(
        traces_of(2, REQUESTS)["speculative"],
        expected_latency(
            ttft_s=[12 * READ, 12 * READ, read_2],
            gaps_s=[joint, [*joint, read_2 + alone[0]], alone],
            sizes=[[4, 2, 2], [1, 1, 4, 2], [2, 1, 1, 1]],
            queue_s=[Fraction(0), Fraction(0), 12 * READ + total(joint)],
        ),
        {
            "throughput/decode_tok_s_aggregate": 21 / total(steps),
            "throughput/prefill_tok_s": 1 / READ,
            "spec/tokens_per_pass": Fraction(21, 11),
            # as above; request 2: 3 1, 2 0, 1 0, 0 0
            "spec/drafted": Fraction(23),
            "spec/accepted": Fraction(10),
            "spec/acceptance_rate": Fraction(10, 23),
            "spec/acceptance_rate_judged": Fraction(10, 10 + 4 + 2),
            "spec/accept_pos_1": Fraction(6, 10),
            "spec/accept_pos_2": Fraction(2, 7),
            "spec/accept_pos_3": Fraction(2, 6),
            "spec/accept_cond_1": Fraction(6, 10),
            "spec/accept_cond_2": Fraction(2, 4),
            "spec/accept_cond_3": Fraction(2, 2),
            "spec/draft_ms.mean": 1000 * (total(steps) - 6 * JUDGE - undrafted) / 7,
            "spec/verify_ms.mean": 1000 * (6 * VERIFY + DECODE) / 7,
            "spec/overhead_ms.mean": 1000 * 2 * COMMIT,
            "passes/target": Fraction(3 + 7),
            "passes/draft": Fraction(3 + 4 * 3 + 2 + 1),
        },
    )


class Searching(Drafter):
    """Takes as long as a draft pass to look for something, and finds two tokens at first and nothing later."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.found = [[2, 3]]

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        self.clock.now += float(DRAFT)
        return DraftProposal.certain([self.found.pop() if self.found else []], toy_engine.CPU)


def test_searches_that_find_nothing_are_drafting_and_no_overhead() -> None:
    """Answer 0 begins 1 (prefill), 2 3 (drafted) and 4; then 5, 6 and 1, one by one."""
    clock = Clock()
    decoder = build_decoder(
        SimulatedRunner(law(), VOCAB, 1, clock), num_slots=1, drafter=Searching(clock), draft_length=2
    )
    traces = measure({"arm": decoder}, [[Request(0, (0,) * 4, 7)]], warmup=0, clock=clock)
    found = metrics.arm_metrics(traces)
    assert found["spec/tokens_per_pass"] == 6 / 4
    assert found["spec/draft_ms.mean"] == 1000 * DRAFT
    assert found["spec/verify_ms.mean"] == 1000 * (VERIFY + 3 * DECODE) / 4
    assert found["spec/overhead_ms.mean"] == 1000 * COMMIT
    parts = ("spec/draft_ms.mean", "spec/verify_ms.mean", "spec/overhead_ms.mean")
    assert sum(found[name] for name in parts) / found["spec/tokens_per_pass"] == found["latency/tpot_ms.mean"]


class SlowingRunner(SimulatedRunner):
    """Each decode pass takes 1/64 s more than the one before."""

    def decode(self, *arguments: Any) -> Any:
        self.clock.now += sum(verb == "decode" for verb, _ in self.passes) / 64
        return super().decode(*arguments)


def test_a_hundred_tokens_have_a_99th_percentile() -> None:
    clock = Clock()
    decoder = build_decoder(SlowingRunner(law(), VOCAB, 1, clock), num_slots=1)
    traces = measure({"arm": decoder}, [[Request(0, (0,) * 4, 102)]], warmup=0, clock=clock)
    gaps = [PLAIN_STEP + Fraction(i, 64) for i in range(101)]
    check(
        traces,
        expected_latency([4 * READ], [gaps], [[1] * 101], [Fraction(0)]),
        {
            "latency/itl_ms.p99": 1000 * gaps[99],
            "latency/step_gap_ms.p99": 1000 * gaps[99],
            "throughput/decode_tok_s_aggregate": 101 / total(gaps),
            "throughput/prefill_tok_s": 1 / READ,
            "spec/tokens_per_pass": Fraction(1),
            "passes/target": Fraction(1 + 101),
            "passes/draft": Fraction(0),
        },
    )


@pytest.mark.parametrize("arm", ["plain", "speculative"])
def test_repeats_pool_their_samples(arm: str) -> None:
    once, twice = (metrics.arm_metrics(traces_of(2, REQUESTS, repeats=n)[arm]) for n in (1, 2))
    doubled = {n for n in once if n.startswith("passes/") or n.endswith((".n", "/drafted", "/accepted"))}
    percentiles = {name for name in once if name.endswith((".p50", ".p90"))}
    for name in set(once) - percentiles:
        assert twice[name] == once[name] * (2 if name in doubled else 1), name


# --- section 1 of the metrics contract: the same total on an independent clock


@pytest.mark.parametrize("num_slots", [1, 2])
def test_first_token_and_gaps_are_the_time_on_an_outer_clock(num_slots: int) -> None:
    clock = Clock()
    arms = {"plain": plain(clock, num_slots), "speculative": speculative(clock, num_slots)}
    outer = {arm: watched(decoder, clock) for arm, decoder in arms.items()}
    for trace in measure(arms, [REQUESTS], warmup=0, clock=clock):
        for found in timelines(trace):
            request = metrics.request_metrics(found)
            assert request.tpot_ms is not None
            later = found.num_tokens - found.commit_sizes[0]
            total_ms = 1000 * outer[trace.arm][found.request_id]
            assert request.ttft_ms + sum(request.itl_ms) == total_ms
            assert request.ttft_ms + later * request.tpot_ms == total_ms
            assert request.total_ms == total_ms


def watched(decoder: Decoder, clock: Clock) -> dict[int, float]:
    """Seconds from the call whose step admits a request to the step that finishes it, filled in as it decodes."""
    inner: Callable[[Sequence[Request]], Iterator[StepOutput]] = decoder.generate
    asked_s: dict[int, float] = {}
    took_s: dict[int, float] = {}

    def generate(requests: Sequence[Request]) -> Iterator[StepOutput]:
        now = clock.now
        for output in inner(requests):
            for request_id, finished in zip(output.request_ids, output.finished, strict=True):
                asked_s.setdefault(request_id, now)
                if finished:
                    took_s[request_id] = clock.now - asked_s[request_id]
            yield output
            now = clock.now

    decoder.generate = generate  # type: ignore[method-assign]
    return took_s


# --- arms against each other


def by_unit(traces: Sequence[Trace], arm: str) -> dict[statistics.Unit, RequestTimeline]:
    return statistics.by_unit([t for trace in traces if trace.arm == arm for t in timelines(trace)])


def test_an_arm_against_itself_shows_no_difference() -> None:
    clock = Clock()
    arms = {"a": speculative(clock, 2), "a again": speculative(clock, 2)}
    traces = measure(arms, [REQUESTS[:1], REQUESTS[1:2]], repeats=4, seed=3, clock=clock)
    ours, again = (metrics.arm_metrics([t for t in traces if t.arm == arm]) for arm in arms)
    assert ours == again
    found = statistics.speedups(by_unit(traces, "a again"), by_unit(traces, "a"))
    for ratio in (found.decode, found.total, found.ttft):
        assert ratio is not None
        assert (ratio.value, ratio.ci_low, ratio.ci_high, ratio.sd_log) == (1.0, 1.0, 1.0, 0.0)
        assert (ratio.num_pairs, ratio.verdict) == (8, statistics.NO_DIFFERENCE)


def test_twice_as_slow_is_exactly_twice_as_slow() -> None:
    clock = Clock()
    arms = {"fast": plain(clock, 1), "slow": plain(clock, 1, scale=2.0)}
    traces = measure(arms, [REQUESTS[:1], REQUESTS[1:2]], repeats=4, clock=clock)  # 8 pairs
    fast, slow = by_unit(traces, "fast"), by_unit(traces, "slow")
    for arm, reference, value, verdict in (
        (fast, slow, 2.0, statistics.FASTER),
        (slow, fast, 0.5, statistics.SLOWER),
    ):
        found = statistics.speedups(arm, reference)
        for ratio in (found.decode, found.total, found.ttft):
            assert ratio is not None
            assert (ratio.value, ratio.ci_low, ratio.ci_high) == (value, value, value)
            assert (ratio.num_pairs, ratio.verdict) == (8, verdict)


def test_a_recorder_that_has_to_grow_records_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    large = simulate(2, REQUESTS, repeats=2)
    monkeypatch.setattr(timed, "Recorder", partial(Recorder, num_rows=1))
    assert simulate(2, REQUESTS, repeats=2) == large
    assert len(large["speculative"][0].passes) > 16  # grew several times


# --- predicted speed-up


def predicted(wrong: Sequence[set[int]], limit: int) -> dict[str, float]:
    """Two drafts a step; a draft pass takes 1/8 s, a plain one 2 s, nothing else but passes takes time."""
    clock = Clock()
    requests = [Request(0, (0,) * 4, limit)]
    arms = {
        "plain": plain(clock, 1, scale=2.0),
        "spec": speculative(clock, 1, wrong, k=2, draft_scale=0.125),
    }
    traces = {trace.arm: [trace] for trace in measure(arms, [requests], warmup=0, clock=clock)}
    return metrics.prediction(traces["spec"], traces["plain"])


@pytest.mark.parametrize(
    ("wrong", "limit", "gain"),
    [
        # Rejected at once (the second draft token is not judged), then both accepted: 2 of 3 judged ones stand.
        (({1}, set(), set()), 5, 1 + Fraction(2, 3) + Fraction(4, 9)),
        # All accepted: 3 tokens a step.
        (NEVER_WRONG, 7, Fraction(3)),
    ],
    ids=["half", "all"],
)
def test_the_prediction_is_the_papers_from_measured_costs(
    monkeypatch: pytest.MonkeyPatch, wrong: Sequence[set[int]], limit: int, gain: Fraction
) -> None:
    monkeypatch.setattr(toy_clock, "OVERHEAD_S", 0.0)
    drafting = 4 * Fraction(1, 8) + 4 * READ / 8  # of two steps: four passes, and the prompt once
    cost = (drafting / 2 + VERIFY) / (2 * DECODE)
    # Two draft tokens a step: 1 + a + a^2 tokens.
    break_even = max(0.0, (math.sqrt(max(0.0, float(4 * cost - 3))) - 1) / 2)
    expected = {
        "spec/predicted_speedup": pytest.approx(float(gain / cost), rel=1e-15),
        "spec/break_even_acceptance": pytest.approx(break_even, rel=1e-12),
    }
    assert predicted(wrong, limit) == expected


def test_nothing_is_predicted_without_drafts_or_plain_steps() -> None:
    traces = traces_of(1, REQUESTS[:1])
    assert metrics.prediction(traces["plain"], traces["plain"]) == {}
    assert metrics.prediction(traces["speculative"], []) == {}


# --- the same passes beside the ceilings

COST = ModelCost(
    weights_read_bytes=500_000_000,
    embedding_row_bytes=15_000_000,
    kv_bytes_per_token=5_000_000,
    body_parameters=60_000_000,
    head_parameters=15_000_000,
    attention_width=15_000_000,
)
CEILINGS = Ceilings(read_gb_s=0.5, gemm_gflop_s=4.0)


def passes_of(arm: str, phase: str) -> list[PassEvent]:
    """Of request 0 alone."""
    (trace,) = traces_of(1, REQUESTS[:1])[arm]
    return [event for event in trace.passes if event.phase == phase]


@pytest.mark.parametrize(
    ("arm", "phase", "weights", "rows", "tokens", "cached", "seconds"),
    [
        ("plain", "decode", 8, 0, 8, sum(range(5, 13)), 8 * DECODE),
        # After verifying 8, 12 and 12 tokens are cached.
        ("speculative", "verify", 3, 3 + 3 + 1, 4 + 4 + 2, 8 + 12 + 12, 3 * VERIFY),
        # The first pass after a step of which all was accepted reads two tokens.
        ("speculative", "draft", 7, 1, 8, 5 + 6 + 7 + 9 + 10 + 11 + 11, 7 * DRAFT),
    ],
)
def test_the_share_of_the_bandwidth(
    arm: str, phase: str, weights: int, rows: int, tokens: int, cached: int, seconds: Fraction
) -> None:
    moved = weights * 500_000_000 + rows * 15_000_000 + (cached + tokens) * 5_000_000
    found = roofline.mbu_frac(passes_of(arm, phase), COST, CEILINGS)
    assert found == float(moved / seconds / 500_000_000)


@pytest.mark.parametrize(
    ("phase", "tokens", "heads", "attended", "seconds"),
    [
        ("prefill", 4, 1, 1 + 2 + 3 + 4, 4 * READ),
        ("verify", 10, 10, (5 + 6 + 7 + 8) + (9 + 10 + 11 + 12) + (11 + 12), 3 * VERIFY),
    ],
)
def test_the_share_of_the_arithmetic(
    phase: str, tokens: int, heads: int, attended: int, seconds: Fraction
) -> None:
    operations = 2 * (60_000_000 * tokens + 15_000_000 * heads) + 4 * 15_000_000 * attended
    found = roofline.mfu_frac(passes_of("speculative", phase), COST, CEILINGS)
    assert found == float(operations / seconds / 4_000_000_000)


def test_where_a_mean_verify_pass_goes() -> None:
    assert roofline.floor_ms(COST, CEILINGS) == 1000.0
    parts = roofline.pass_parts(passes_of("speculative", "verify"), COST, CEILINGS, overhead_ms=10.0)
    # In ms: weights 1000, 7 / 3 more embedding rows of 30 each, 42 / 3 cached tokens of 10 each.
    assert parts == roofline.PassParts(pass_ms=1250.0, floor_ms=1070.0, kv_ms=140.0, overhead_ms=10.0)
    assert parts.rest_ms == 30.0


def test_the_verify_passes_on_the_roofline() -> None:
    moved = Fraction(3 * 500 + 7 * 15 + 42 * 5, 1000)  # 1e9 bytes
    operations = Fraction(2 * 75 * 10 + 4 * 15 * 91, 1000)
    assert roofline.point("verify", passes_of("speculative", "verify"), COST) == roofline.RooflinePoint(
        "verify",
        3,
        float(operations / moved),
        float(operations / (3 * VERIFY)),
        float(moved / (3 * VERIFY)),
    )
