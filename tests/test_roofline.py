"""What passes must move and compute, counted by hand or by a loop over every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from experiments.roofline import (
    Ceilings,
    ModelCost,
    PassParts,
    RooflinePoint,
    floor_ms,
    mbu_frac,
    mfu_frac,
    pass_parts,
    point,
)
from experiments.trace import PassEvent

WEIGHTS, ROW, KV, BODY, HEAD, WIDTH = 1000, 8, 2, 300, 70, 5
COST = ModelCost(WEIGHTS, ROW, KV, BODY, HEAD, WIDTH)
TIED = ModelCost(WEIGHTS, 0, KV, BODY, HEAD, WIDTH)
CEILINGS = Ceilings(read_gb_s=2.0, gemm_gflop_s=8.0)


def event(
    phase: str,
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    width: int | None = None,
    num_passes: int = 1,
    seconds: float = 1.0,
) -> PassEvent:
    """`lengths` are the cached tokens of each row afterwards."""
    return PassEvent(
        phase,
        0.5,
        0.5 + seconds,
        tuple(counts),
        max(counts) if width is None else width,
        tuple(lengths),
        sum(lengths),
        num_passes,
    )


WHOLE_PROMPT = event("prefill", [6], [6])
CHUNKED_PROMPT = event("prefill", [6], [6], num_passes=3)  # 2 tokens each
ONE_ROW = event("decode", [1], [9])
FOUR_ROWS = event("decode", [1, 1, 1, 1], [9, 5, 7, 3])
RAGGED = event("verify", [4, 2], [9, 5])
CATCHING_UP = event("draft", [2, 1], [9, 5])
# Of the second row nothing was wanted.
ONE_ROW_DRAFTS = event("draft", [1, 0], [9, 5], width=1)


def test_a_pass_reads_the_weights_once_and_a_row_of_the_table_per_further_token() -> None:
    assert COST.weight_bytes(ONE_ROW) == WEIGHTS
    assert COST.weight_bytes(FOUR_ROWS) == WEIGHTS + 3 * ROW
    assert COST.weight_bytes(RAGGED) == WEIGHTS + 5 * ROW
    assert COST.weight_bytes(WHOLE_PROMPT) == WEIGHTS + 5 * ROW
    assert COST.weight_bytes(ONE_ROW_DRAFTS) == WEIGHTS


def test_each_chunk_of_a_prompt_reads_the_weights() -> None:
    assert COST.weight_bytes(CHUNKED_PROMPT) == 3 * WEIGHTS + 3 * ROW


@pytest.mark.parametrize("one", [WHOLE_PROMPT, FOUR_ROWS, RAGGED])
def test_a_table_that_is_the_head_is_read_whole_and_once(one: PassEvent) -> None:
    assert TIED.weight_bytes(one) == WEIGHTS


def test_cached_tokens_are_read_and_new_ones_written() -> None:
    assert COST.kv_bytes(ONE_ROW) == KV * (9 + 1)
    assert COST.kv_bytes(FOUR_ROWS) == KV * (9 + 5 + 7 + 3 + 4)
    assert COST.kv_bytes(RAGGED) == KV * (9 + 5 + 6)
    assert COST.kv_bytes(WHOLE_PROMPT) == KV * (6 + 6)


def test_each_chunk_of_a_prompt_reads_what_was_cached_before_it() -> None:
    assert COST.kv_bytes(CHUNKED_PROMPT) == KV * ((2 + 4 + 6) + 6)


def test_bytes_moved_are_weights_and_cache() -> None:
    assert COST.bytes_moved(RAGGED) == COST.weight_bytes(RAGGED) + COST.kv_bytes(RAGGED)


def attended(counts: Sequence[int], lengths: Sequence[int]) -> int:
    """Pairs of a new token and a token that it sees: all before it, and itself."""
    return sum(
        1
        for count, length in zip(counts, lengths, strict=True)
        for new in range(length - count, length)
        for seen in range(length)
        if seen <= new
    )


@pytest.mark.parametrize(
    ("one", "heads"),
    [
        (WHOLE_PROMPT, 1),
        (CHUNKED_PROMPT, 3),
        (ONE_ROW, 1),
        (FOUR_ROWS, 4),
        (RAGGED, 2 * 4),  # padding has logits too
        (event("verify", [3], [9]), 3),
        (event("draft_prefill", [7], [7]), 1),
        (CATCHING_UP, 2 * 2),
        (event("draft", [2, 2], [9, 5]), 2),
        (ONE_ROW_DRAFTS, 2),
    ],
    ids=[
        "prompt",
        "prompt in chunks",
        "one row",
        "four rows",
        "ragged verify",
        "verify one row",
        "draft model's prompt",
        "one row catches up",
        "both catch up",
        "one row drafts",
    ],
)
def test_operations_are_those_of_every_token_and_of_the_heads_positions(one: PassEvent, heads: int) -> None:
    products = BODY * sum(one.counts) + HEAD * heads
    expected = 2 * products + 4 * WIDTH * attended(one.counts, one.kv_lengths)
    assert COST.operations(one) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 64])
def test_a_prompt_read_at_once_attends_to_what_is_before_each_token(num_tokens: int) -> None:
    """Layer by layer, pair by pair: a product with the key, one with the value, two operations each."""
    layers, heads, head_dim = 3, 2, 4
    cost = ModelCost(0, 0, 0, 0, 0, attention_width=layers * heads * head_dim)
    pairs = [(new, seen) for new in range(num_tokens) for seen in range(new + 1)]
    operations = sum(2 * head_dim + 2 * head_dim for _ in range(layers * heads) for _ in pairs)
    assert cost.operations(event("prefill", [num_tokens], [num_tokens])) == operations


# --- shares of the ceilings


def test_shares_are_ratios_of_sums_not_means_of_ratios() -> None:
    slow, fast = event("decode", [1], [9], seconds=4.0), event("decode", [1], [9], seconds=1.0)
    giga = ModelCost(5 * 10**9, 0, 0, 10 * 10**9, 0, 0)
    assert mbu_frac([slow, fast], giga, CEILINGS) == 10 / 5 / 2
    assert mfu_frac([slow, fast], giga, CEILINGS) == 40 / 5 / 8


def test_the_floor_is_reading_the_weights_once() -> None:
    assert floor_ms(ModelCost(10**9, ROW, KV, BODY, HEAD, WIDTH), CEILINGS) == 500.0


def test_a_mean_pass_is_over_passes_not_events() -> None:
    cost = ModelCost(10**9, 0, 10**8, 0, 0, 0)
    prompt = event("prefill", [6], [6], num_passes=3, seconds=3.0)
    parts = pass_parts([prompt, event("prefill", [2], [2], seconds=1.0)], cost, CEILINGS, 100.0)
    # cached tokens read: 2 + 4 + 6 and 2; written: 6 and 2
    assert parts == PassParts(pass_ms=1000.0, floor_ms=500.0, kv_ms=22 * 50.0 / 4, overhead_ms=100.0)
    assert parts.rest_ms == 1000.0 - 500.0 - 275.0 - 100.0


def test_the_rest_is_negative_where_parts_overlap() -> None:
    parts = pass_parts([event("decode", [1], [1])], ModelCost(2 * 10**9, 0, 0, 0, 0, 0), CEILINGS, 64.0)
    assert parts is not None
    assert parts.rest_ms == -64.0


def test_a_point_is_operations_over_bytes_and_rates() -> None:
    events = [event("decode", [1], [9], seconds=2.0), event("decode", [1], [10], seconds=2.0)]
    cost = ModelCost(10**9, 0, 0, 2 * 10**9, 0, 0)
    assert point("decode", iter(events), cost) == RooflinePoint("decode", 2, 4.0, 2.0, 0.5)


def test_nothing_happened_so_nothing_is_said() -> None:
    assert mbu_frac([], COST, CEILINGS) is None
    assert mfu_frac([], COST, CEILINGS) is None
    assert pass_parts([], COST, CEILINGS, 1.0) is None
    assert point("decode", [], COST) is None


def test_passes_that_took_no_time_have_no_rate() -> None:
    instant = [event("decode", [1], [9], seconds=0.0)]
    assert mbu_frac(instant, COST, CEILINGS) is None
    assert mfu_frac(instant, COST, CEILINGS) is None
    assert point("decode", instant, COST) is None
