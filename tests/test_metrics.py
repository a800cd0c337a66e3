"""Metrics of traces written by hand. Times are binary fractions of a second: every expected value is exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_traces import forward, step, timeline, trace

from experiments import metrics
from experiments.metrics import is_repetitive, request_metrics
from experiments.trace import Trace, timelines

MS = 1000.0


def blocks_of_four() -> Trace:
    """Prompt of 8 tokens read in 1 s, then two verify steps of 0.5 s that commit 4 and 3 tokens of 4 drafted.

    Each step: 0.125 s drafting, 0.25 s verifying, the rest (0.125 s) is overhead. In the second step the third
    draft token is rejected.
    """
    return trace(
        step(0.0, 1.0, "prefill", {0: [10]}),
        step(1.0, 1.5, "verify", {0: [11, 12, 13, 14]}, drafted=[3], accepted=[3]),
        step(1.5, 2.0, "verify", {0: [15, 16, 17]}, drafted=[3], accepted=[2]),
        passes=[
            forward("prefill", 0.0, 0.5, [8]),
            forward("draft_prefill", 1.0, 1.0625, [8]),
            forward("draft", 1.0625, 1.125),
            forward("verify", 1.125, 1.375, [4]),
            forward("draft", 1.5, 1.625),
            forward("verify", 1.625, 1.875, [4]),
        ],
        proposals=[(1.0, 1.125), (1.5, 1.625)],
    )


# --- one request


def test_tokens_are_counted_not_commits() -> None:  # M1
    found = metrics.arm_metrics([blocks_of_four()])
    assert found["throughput/decode_tok_s_request.mean"] == 7.0
    assert found["throughput/decode_tok_s_aggregate"] == 7.0
    assert found["latency/tpot_ms.mean"] == MS / 7


def test_first_token_is_not_in_the_inter_token_list() -> None:  # M2
    (request,) = map(request_metrics, timelines(blocks_of_four()))
    assert request.ttft_ms == 1000.0
    assert request.itl_ms == (*[125.0] * 4, *[500.0 / 3] * 3)
    assert request.step_gaps_ms == (500.0, 500.0)


def test_token_ids_are_counted_not_text() -> None:  # M3
    spaces = trace(step(0.0, 1.0, "prefill", {0: [5]}), step(1.0, 2.0, "verify", {0: [5] * 99}, [98], [98]))
    (found,) = timelines(spaces)
    assert found.num_tokens == 100
    assert request_metrics(found).tpot_ms == MS / 99


@pytest.mark.parametrize(
    ("times", "sizes", "tpot", "itl"),
    [
        ([1.0], [1], None, ()),
        ([1.0, 1.5], [1, 1], 500.0, (500.0,)),
        ([1.0, 1.5, 1.75], [1, 1, 1], 375.0, (500.0, 250.0)),
        ([1.0, 1.5], [1, 2], 250.0, (250.0, 250.0)),
        ([1.0], [3], None, ()),
    ],
    ids=["N=1", "N=2", "N=3", "N=3 in two commits", "N=3 in one commit"],
)
def test_short_answers(  # M5
    times: Sequence[float], sizes: Sequence[int], tpot: float | None, itl: tuple[float, ...]
) -> None:
    request = request_metrics(timeline(times, sizes))
    assert (request.tpot_ms, request.itl_ms, request.ttft_ms) == (tpot, itl, 1000.0)


def test_answers_of_one_token_give_no_rate_and_no_gap() -> None:  # M5
    found = metrics.arm_metrics(
        [trace(step(0.0, 1.0, "prefill", {0: [1]}), passes=[forward("prefill", 0.0, 1.0, [4])])]
    )
    assert found["latency/ttft_ms.p50"] == 1000.0
    assert found["throughput/prefill_tok_s"] == 4.0
    for missing in ("latency/tpot_ms", "latency/itl_ms", "latency/step_gap_ms", "throughput/decode"):
        assert not [name for name in found if name.startswith(missing)]


def test_prefill_is_not_in_the_decode_rate() -> None:  # M6
    long_prompt = trace(
        step(0.0, 64.0, "prefill", {0: [1]}),
        step(64.0, 64.5, "decode", {0: [2]}),
        step(64.5, 65.0, "decode", {0: [3]}),
        passes=[
            forward("prefill", 0.0, 32.0, [4096]),
            forward("decode", 64.0, 64.25),
            forward("decode", 64.5, 64.75),
        ],
    )
    found = metrics.arm_metrics([long_prompt])
    assert found["throughput/decode_tok_s_request.mean"] == 2.0
    assert found["throughput/decode_tok_s_aggregate"] == 2.0
    assert found["throughput/prefill_tok_s"] == 128.0
    assert found["latency/ttft_ms.mean"] == 64_000.0


def test_reading_the_text_again_to_decode_is_not_prefill_rate() -> None:
    no_cache = trace(
        step(0.0, 1.0, "prefill", {0: [1]}),
        step(1.0, 3.0, "decode", {0: [2]}),
        passes=[forward("prefill", 0.0, 1.0, [16]), forward("prefill", 1.0, 3.0, [17])],
    )
    assert metrics.throughput([no_cache])["throughput/prefill_tok_s"] == 16.0


@given(
    gaps=st.lists(st.integers(1, 4096), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    admitted=st.integers(0, 4096),
)
def test_the_two_totals_are_the_outer_clock(gaps: list[int], sizes: list[int], admitted: int) -> None:
    """ttft + sum(itl) == ttft + (N - n_1) * tpot == total, up to the last bits of a float64."""
    times = [(admitted + sum(gaps[: i + 1])) / 256 for i in range(len(gaps))]
    found = timeline(times, sizes[: len(times)], admitted_s=admitted / 256)
    request = request_metrics(found)
    total_ms = MS * sum(gaps) / 256
    assert request.total_ms == total_ms
    assert request.ttft_ms + sum(request.itl_ms) == pytest.approx(total_ms, rel=1e-14)
    assert len(request.itl_ms) == found.num_tokens - sizes[0]
    if request.tpot_ms is not None:
        later = (found.num_tokens - sizes[0]) * request.tpot_ms
        assert request.ttft_ms + later == pytest.approx(total_ms, rel=1e-14)


# --- several requests


def ragged_batch() -> Trace:
    """Requests 0 and 1 together; request 2 waits for a slot until 2.0 s."""
    return trace(
        step(0.5, 1.0, "prefill", {0: [1], 1: [2]}),
        step(1.0, 2.0, "verify", {0: [3, 4, 5], 1: [6]}, drafted=[4, 2], accepted=[2, 0]),
        step(2.0, 2.25, "prefill", {2: [7]}),
        step(2.25, 2.75, "verify", {0: [8, 9, 10, 11, 12], 2: [13, 14]}, drafted=[4, 1], accepted=[4, 1]),
        passes=[
            forward("prefill", 0.5, 0.75, [3]),
            forward("prefill", 0.75, 1.0, [5]),
            forward("verify", 1.25, 1.5, [5, 3]),
            forward("prefill", 2.0, 2.25, [8]),
            forward("verify", 2.5, 2.75, [5, 2]),
        ],
        proposals=[(1.0, 1.25), (2.25, 2.5)],
        start_s=0.5,
    )


def test_waiting_for_a_slot_is_queueing_not_first_token_time() -> None:
    found = timelines(ragged_batch())
    assert [t.request_id for t in found] == [0, 1, 2]
    assert [t.queued_s for t in found] == [0.0, 0.0, 1.5]
    assert [request_metrics(t).ttft_ms for t in found] == [500.0, 500.0, 250.0]
    assert metrics.latency([ragged_batch()])["latency/queue_ms.mean"] == 500.0


def test_a_prefill_of_others_is_in_the_gap_of_who_waits_for_it() -> None:
    first = request_metrics(timelines(ragged_batch())[0])
    assert first.step_gaps_ms == (1000.0, 750.0)
    assert first.itl_ms == (*[1000.0 / 3] * 3, *[150.0] * 5)


def test_rates_of_a_request_and_of_all_rows_are_two_numbers() -> None:
    found = metrics.throughput([ragged_batch()])
    # Request 0: 8 tokens in 1.75 s; 1: 1 in 1 s; 2: 2 in 0.5 s.
    assert found["throughput/decode_tok_s_request.mean"] == pytest.approx((8 / 1.75 + 1 + 4) / 3, rel=1e-15)
    # 4 tokens in 1 s, 7 in 0.5 s; the prefill between them is apart.
    assert found["throughput/decode_tok_s_aggregate"] == 11 / 1.5
    assert found["throughput/prefill_tok_s"] == 16 / 0.75


def test_acceptance_is_a_ratio_of_sums() -> None:
    found = metrics.speculation([ragged_batch()])
    assert (found["spec/drafted"], found["spec/accepted"]) == (11, 7)
    assert found["spec/acceptance_rate"] == 7 / 11  # the mean of the rows' rates would be 5 / 8


def test_acceptance_by_position_counts_the_steps_that_drafted_so_far() -> None:
    lengths = trace(
        step(0.0, 1.0, "verify", {0: [1, 2, 3]}, drafted=[2], accepted=[2]),
        step(1.0, 2.0, "verify", {0: [4, 5]}, drafted=[3], accepted=[1]),
        step(2.0, 3.0, "verify", {0: [6]}, drafted=[0], accepted=[0]),
        step(3.0, 4.0, "verify", {0: [7]}, drafted=[1], accepted=[0]),
    )
    found = metrics.speculation([lengths])
    by_position = {name: value for name, value in found.items() if "accept_pos" in name}
    assert by_position == {"spec/accept_pos_1": 2 / 3, "spec/accept_pos_2": 1 / 2, "spec/accept_pos_3": 0.0}
    # 2 + 2 + 1 were judged; the third of the second step stood behind a rejected one.
    assert found["spec/acceptance_rate_judged"] == 3 / 5


def test_tokens_per_pass_are_what_a_request_gains_from_a_pass() -> None:
    # 3 + 1 + 5 + 2 tokens over 4 rows of 2 passes; 5.5 would be tokens over passes.
    assert metrics.tokens_per_pass([ragged_batch()])["spec/tokens_per_pass"] == 11 / 4
    assert metrics.tokens_per_pass([blocks_of_four()])["spec/tokens_per_pass"] == 7 / 2


def test_nothing_drafted_has_no_acceptance_rate() -> None:
    found = metrics.speculation([trace(step(0.0, 1.0, "verify", {0: [1]}, drafted=[0], accepted=[0]))])
    assert not {"spec/acceptance_rate", "spec/acceptance_rate_judged"} & set(found)
    assert found["spec/drafted"] == 0


def test_plain_decoding_has_no_speculation_metrics() -> None:
    plain = trace(step(0.0, 1.0, "prefill", {0: [1]}), step(1.0, 2.0, "decode", {0: [2]}))
    assert metrics.speculation([plain]) == {}


def test_the_times_of_a_step_add_up() -> None:  # M4
    found = metrics.speculation([blocks_of_four()])
    assert found["spec/draft_ms.mean"] == 125.0
    assert found["spec/verify_ms.mean"] == 250.0
    assert found["spec/overhead_ms.mean"] == 125.0


@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 64), st.integers(0, 64), st.integers(0, 64)),
        min_size=1,
        max_size=8,
    )
)
def test_overhead_is_never_negative(spans: list[tuple[int, int, int, int]]) -> None:  # M4
    """For any trace whose passes lie inside their steps, however noisy its times."""
    steps, passes, proposals, now = [], [], [], 0.0
    for before, draft, verify, after in spans:
        start, drafting = now, now + before / 64
        verifying = drafting + draft / 64
        now = verifying + verify / 64 + after / 64
        steps.append(step(start, now, "verify", {0: [1]}, drafted=[1], accepted=[0]))
        proposals.append((drafting, verifying))
        passes.append(forward("verify", verifying, verifying + verify / 64))
    found = metrics.speculation([trace(*steps, passes=passes, proposals=proposals)])
    expected = sum(before + after for before, _, _, after in spans) / 64 / len(spans)
    assert found["spec/overhead_ms.mean"] >= 0
    assert found["spec/overhead_ms.mean"] == MS * expected


def test_draft_passes_are_not_target_passes() -> None:
    assert metrics.passes([blocks_of_four()]) == {"passes/target": 3, "passes/draft": 3}


def test_repeats_are_pooled() -> None:
    slow = trace(step(0.0, 3.0, "prefill", {0: [1]}), step(3.0, 4.0, "decode", {0: [2]}), repeat=1)
    found = metrics.latency([blocks_of_four(), slow])
    assert found["latency/ttft_ms.mean"] == 2000.0
    assert found["latency/total_s.mean"] == 3.0


# --- percentiles and flags


@pytest.mark.parametrize("gaps", [99, 100])
def test_p99_needs_a_hundred_samples(gaps: int) -> None:
    times = [1.0 + 0.25 * number for number in range(gaps + 1)]
    steps = [step(0.0, 1.0, "prefill", {0: [1]})]
    steps += [step(a, b, "decode", {0: [1]}) for a, b in pairwise(times)]
    found = metrics.latency([trace(*steps)])
    assert ("latency/itl_ms.p99" in found) == ("latency/step_gap_ms.p99" in found) == (gaps == 100)
    assert found["latency/itl_ms.max"] == 250.0


def test_percentiles_of_known_samples() -> None:
    traces = [trace(step(0.0, float(n), "prefill", {n: [1]})) for n in (1, 2, 3, 4, 5)]
    found = metrics.latency(traces)
    assert found["latency/ttft_ms.p50"] == 3000.0
    assert found["latency/ttft_ms.p90"] == pytest.approx(4600.0, rel=1e-15)


@pytest.mark.parametrize(
    ("token_ids", "repetitive"),
    [
        ([7] * 16, True),
        ([7] * 15, False),
        (list(range(40)), False),
        ([*range(100), *[1, 2, 3] * 8], True),
        ([*[1, 2, 3] * 8, *range(50, 74)], False),
        ([*range(32)] * 3, True),
        ([*range(33)] * 3, False),
        ([*range(30)] * 2, False),
        ([*[5, 6] * 12, 9], False),
        ([], False),
    ],
    ids=[
        "one token",
        "too short to tell",
        "no loop",
        "ends in a loop",
        "leaves its loop",
        "period 32",
        "period 33",
        "twice is no loop",
        "broken at the end",
        "empty",
    ],
)
def test_loops_are_flagged(token_ids: list[int], repetitive: bool) -> None:  # M9
    assert is_repetitive(token_ids) is repetitive


def test_acceptance_by_position_counts_what_was_drafted_reached_and_accepted() -> None:
    found = metrics.acceptance_by_position([blocks_of_four()])
    assert [(p.position, p.drafted, p.reached, p.accepted) for p in found] == [
        (1, 2, 2, 2),
        (2, 2, 2, 2),
        (3, 2, 2, 1),
    ]
    assert metrics.speculation([blocks_of_four()])["spec/accept_cond_3"] == 0.5


def test_conditional_acceptance_is_of_those_whose_earlier_drafts_stand() -> None:
    """Drafted 2 and 2, accepted 0 and 2: the second is accepted in half of the steps, but whenever it is reached."""
    found = metrics.speculation(
        [
            trace(
                step(0.0, 1.0, "prefill", {0: [1]}),
                step(1.0, 2.0, "verify", {0: [2]}, drafted=[2], accepted=[0]),
                step(2.0, 3.0, "verify", {0: [3, 4, 5]}, drafted=[2], accepted=[2]),
            )
        ]
    )
    assert (found["spec/accept_pos_2"], found["spec/accept_cond_2"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "draft_cost", "verify_cost", "expected"),
    [
        (0.5, 1, 0.5, 1.0, 1.0),  # 1.5 tokens for 1.5 steps
        (0.5, 3, 0.25, 1.0, 1.875 / 1.75),
        (1.0, 4, 0.0, 1.0, 5.0),
        (0.0, 4, 0.25, 1.0, 0.5),
    ],
)
def test_predicted_speedup_is_leviathans(
    acceptance: float, drafted: int, draft_cost: float, verify_cost: float, expected: float
) -> None:
    assert metrics.predicted_speedup(acceptance, drafted, draft_cost, verify_cost) == expected


@pytest.mark.parametrize(
    ("drafted", "draft_cost", "verify_cost", "expected"),
    [
        (1, 0.5, 1.0, 0.5),  # 1 + a tokens for 1.5 steps
        (2, 0.0, 1.75, 0.5),  # 1 + a + a^2
        (4, 0.0, 0.5, 0.0),  # pays with nothing accepted
        (2, 1.0, 1.0, 1.0),
        (2, 1.5, 1.0, None),  # three tokens at most, for four steps
    ],
)
def test_break_even_is_where_the_prediction_is_one(
    drafted: int, draft_cost: float, verify_cost: float, expected: float | None
) -> None:
    found = metrics.break_even_acceptance(drafted, draft_cost, verify_cost)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_percentiles_carry_their_number_of_samples() -> None:
    found = metrics.latency([blocks_of_four()])
    assert found["latency/ttft_ms.n"] == 1
    assert found["latency/itl_ms.n"] == 7
    assert found["latency/step_gap_ms.n"] == 2
    assert found["latency/tpot_ms.n"] == 1


def test_no_traces_no_metrics() -> None:
    assert metrics.arm_metrics([]) == {"passes/target": 0, "passes/draft": 0}
