"""The contract of every KV store, against attention written out token by token.

A new store joins by one line in STORES. A lossy one says there what a query sees of its row, as a function of positions
alone; then it too must match the oracle to rounding, whatever passes wrote the tokens, and a fresh run on the accepted
tokens bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quant.kv.per_token import PerTokenOptions
from quant.kv.sealed_groups import SealedGroupsOptions
from quant.primitives import pack_groups, unpack_groups
from specdec.attention import AttentionRule
from specdec.kv_cache import CacheShape, KVCache, KVStore
from specdec.kv_stores.dense import DenseOptions

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS, NUM_SLOTS, KV_HEADS, HEADS, HEAD_DIM = 2, 3, 2, 4, 8
CAPACITY = 50
SCALING = HEAD_DIM**-0.5


# What the query at a position sees of its row's keys and values, `[KVH, N, D]` each, its own included.
See = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
TOLERANCE = 1e-12


@dataclass(frozen=True)
class StoreCase:
    """A store under test, and what its queries see."""

    build: Callable[[CacheShape], KVStore]
    see: See


def rounded(numbers: Tensor, bits: int, dim: int) -> Tensor:
    return unpack_groups(pack_groups(numbers, bits, dim, torch.bfloat16), bits, torch.float64)


def in_groups(numbers: Tensor, bits: int, group: int) -> Tensor:
    """Each token on its own."""
    return rounded(numbers.unflatten(-1, (-1, group or HEAD_DIM)), bits, -1).flatten(-2)


def dense() -> StoreCase:
    return StoreCase(DenseOptions().build, lambda keys, values, position: (keys, values))


def per_token(key_bits: int, value_bits: int, group: int = 0) -> StoreCase:
    def see(keys: Tensor, values: Tensor, position: int) -> tuple[Tensor, Tensor]:
        return in_groups(keys, key_bits, group), in_groups(values, value_bits, group)

    return StoreCase(PerTokenOptions(key_bits, value_bits, group).build, see)


def sealed(key_bits: int, value_bits: int, block: int, tail: int, sink: int = 0, group: int = 0) -> StoreCase:
    def see(keys: Tensor, values: Tensor, position: int) -> tuple[Tensor, Tensor]:
        keys, values = keys.clone(), values.clone()
        for start in range(sink, position - block - tail + 1, block):
            one = slice(start, start + block)
            keys[:, one] = rounded(keys[:, one], key_bits, 1)
            values[:, one] = in_groups(values[:, one], value_bits, group)
        return keys, values

    options = SealedGroupsOptions(key_bits, value_bits, group, block, tail, sink)
    return StoreCase(options.build, see)


STORES = {
    "dense": dense(),
    "per_token_8": per_token(8, 8),
    "per_token_4_in_groups": per_token(4, 4, group=4),
    "per_token_8_2": per_token(8, 2),
    "sealed_8": sealed(8, 8, block=16, tail=8),
    "sealed_8_4_sink": sealed(8, 4, block=4, tail=6, sink=3, group=4),
    "sealed_4": sealed(4, 4, block=8, tail=6),
    "sealed_2_4_long_tail": sealed(2, 4, block=8, tail=33, sink=1),
    "sealed_blocks_of_one": sealed(2, 2, block=1, tail=4),
    "sealed_sink_only": sealed(4, 4, block=8, tail=8, sink=60),
}


@pytest.fixture(params=sorted(STORES))
def case(request: pytest.FixtureRequest) -> StoreCase:
    return STORES[request.param]


def shape(dtype: torch.dtype = torch.float64, longest_pass: int | None = None) -> CacheShape:
    cpu = torch.device("cpu")
    return CacheShape(NUM_LAYERS, NUM_SLOTS, KV_HEADS, CAPACITY, HEAD_DIM, dtype, cpu, longest_pass)


class Texts:
    """Keys, values and queries of tokens: token n of text t in layer l always has the same ones."""

    def __init__(self, num_texts: int = NUM_SLOTS, length: int = CAPACITY, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(heads: int) -> Tensor:
            size = (num_texts, NUM_LAYERS, heads, length, HEAD_DIM)
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.keys, self.values, self.queries = numbers(KV_HEADS), numbers(KV_HEADS), numbers(HEADS)


TEXTS = Texts()
JUNK = Texts(seed=1)


def run_pass(
    cache: KVCache,
    counts: Sequence[int],
    width: int,
    texts: Sequence[int] = (0, 1, 2),
    first_slot: int = 0,
    source: Texts = TEXTS,
    window: int | None = None,
    is_fixed: bool = False,
) -> list[Tensor]:
    """Append the next `counts[b]` tokens of text `texts[b]`; padding is loud. Attention `[B, T, H, D]` per layer."""
    layout = cache.layout(first_slot, counts, width, is_fixed)
    outputs = []
    for layer in range(NUM_LAYERS):
        keys = torch.full((len(counts), KV_HEADS, width, HEAD_DIM), 1e30, dtype=torch.float64)
        values, queries = keys.clone(), torch.ones(len(counts), HEADS, width, HEAD_DIM, dtype=torch.float64)
        for row, (text, start, count) in enumerate(zip(texts, layout.starts, counts, strict=False)):
            new = slice(start, start + count)
            keys[row, :, :count] = source.keys[text, layer, :, new]
            values[row, :, :count] = source.values[text, layer, :, new]
            queries[row, :, :count] = source.queries[text, layer, :, new]
        cache.store.write(layer, layout, keys, values)
        outputs.append(cache.store.attend(layer, queries, layout, AttentionRule(SCALING, window)))
    cache.advance(layout)
    return outputs


@functools.cache
def seen(case: StoreCase, text: int, layer: int, position: int) -> tuple[Tensor, Tensor]:
    own = slice(position + 1)
    return case.see(TEXTS.keys[text, layer, :, own], TEXTS.values[text, layer, :, own], position)


@functools.cache
def oracle(case: StoreCase, text: int, layer: int, position: int, window: int | None = None) -> Tensor:
    """Attention of one token over what it sees of the tokens up to it, `[H, D]`."""
    keys, values = seen(case, text, layer, position)
    first = 0 if window is None else max(0, position + 1 - window)
    rows = []
    for head in range(HEADS):
        kv_head = head * KV_HEADS // HEADS
        query = TEXTS.queries[text, layer, head, position]
        weights = torch.softmax(keys[kv_head, first:] @ query * SCALING, 0)
        rows.append(weights @ values[kv_head, first:])
    return torch.stack(rows)


def assert_matches(
    outputs: list[Tensor],
    case: StoreCase,
    starts: Sequence[int],
    counts: Sequence[int],
    window: int | None = None,
    texts: Sequence[int] = (0, 1, 2),
) -> None:
    for layer, output in enumerate(outputs):
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for offset in range(count):
                expected = oracle(case, texts[row], layer, start + offset, window)
                torch.testing.assert_close(output[row, offset], expected, rtol=0, atol=TOLERANCE)


def prefilled(case: StoreCase, lengths: Sequence[int]) -> KVCache:
    cache = KVCache(case.build(shape()))
    for slot, length in enumerate(lengths):
        run_pass(cache, [length], length, [slot], first_slot=slot)
    return cache


def assert_same_bits(left: list[Tensor], right: list[Tensor], counts: Sequence[int]) -> None:
    for a, b in zip(left, right, strict=True):
        for row, count in enumerate(counts):
            assert torch.equal(a[row, :count], b[row, :count])


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 3, 4], [0, 4, 2], [1, 1, 1], [0, 0, 3], [4, 0, 0]])
def test_ragged_writes(case: StoreCase, counts: list[int]) -> None:
    starts = [7, 12, 3]
    cache = prefilled(case, starts)
    assert_matches(run_pass(cache, counts, max(counts)), case, starts, counts)
    grown = [start + count for start, count in zip(starts, counts, strict=True)]
    assert cache.lengths == grown
    assert_matches(run_pass(cache, [2, 1, 2], 2), case, grown, [2, 1, 2])


@pytest.mark.parametrize("length", [1, HEAD_DIM - 1, HEAD_DIM, HEAD_DIM + 1, 4 * HEAD_DIM, 40, CAPACITY])
def test_whole_prompts(case: StoreCase, length: int) -> None:
    cache = KVCache(case.build(shape()))
    assert_matches(run_pass(cache, [length], length, [0]), case, [0], [length])


def test_aligned_rows(case: StoreCase) -> None:
    cache = prefilled(case, [5, 5, 5])
    for position in (5, 6):
        assert_matches(run_pass(cache, [1, 1, 1], 1), case, [position] * 3, [1, 1, 1])
    assert_matches(run_pass(cache, [3, 3, 3], 3), case, [7] * 3, [3] * 3)


def test_chunks_store_what_one_pass_stores(case: StoreCase) -> None:
    whole, chunked = prefilled(case, [40]), KVCache(case.build(shape()))
    for start in range(0, 40, 8):
        chunked.advance(chunked.layout(0, [0], 1))  # no tokens, no change
        run_pass(chunked, [8], 8, [0])
        assert chunked.lengths[0] == start + 8
    assert_same_bits(run_pass(whole, [3], 3, [0]), run_pass(chunked, [3], 3, [0]), [3])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("width", [1, 3, 7, 16, CAPACITY])
def test_what_a_query_sees_does_not_depend_on_the_passes(
    case: StoreCase, width: int, commit: bool, window: int | None
) -> None:
    """Three whole texts in passes of equal width, or of ragged counts, across all borders of blocks."""
    cache = KVCache(case.build(shape()))
    while min(cache.lengths) < CAPACITY:
        starts = list(cache.lengths)
        counts = [min(CAPACITY - start, max(1, width - row)) for row, start in enumerate(starts)]
        outputs = run_pass(cache, counts, max(counts), window=window)
        assert_matches(outputs, case, starts, counts, window)
        if commit:
            cache.commit()


def test_what_is_stored_does_not_depend_on_the_passes(case: StoreCase) -> None:
    """Token by token, in blocks of which some tokens are rejected, and at once: the same bits after the same commit."""
    single, drafted, at_once = (KVCache(case.build(shape(longest_pass=1))) for _ in range(3))
    while single.lengths[0] < 43:
        run_pass(single, [1, 1, 1], 1)
        single.commit()
    while drafted.lengths[0] < 43:
        kept = [min(43 - drafted.lengths[0], 3)] * 3
        run_pass(drafted, kept, 3)
        grown = list(drafted.lengths)
        run_pass(drafted, [2, 0, 4], 4, source=JUNK)
        drafted.roll_back(grown)
        drafted.commit()
    run_pass(at_once, [43] * 3, 43)
    at_once.commit()
    outputs = [run_pass(cache, [1, 1, 1], 1) for cache in (single, drafted, at_once)]
    assert_same_bits(outputs[0], outputs[1], [1, 1, 1])
    assert_same_bits(outputs[0], outputs[2], [1, 1, 1])
    assert single.store.allocated_bytes() == at_once.store.allocated_bytes()


def test_fixed_passes_round_alike_wherever_they_begin(case: StoreCase) -> None:
    """What exactness=bitwise rests on: the same token in passes of one shape that began earlier or later."""
    width = 4
    single, wide = (KVCache(case.build(shape(longest_pass=width))) for _ in range(2))
    for cache in (single, wide):
        for slot, length in enumerate([2, 9, 14]):
            run_pass(cache, [length], length, [slot], first_slot=slot)
            cache.commit_slot(slot)
    for _ in range(8):
        starts = list(single.lengths)
        together = run_pass(wide, [4, 4, 4], width, is_fixed=True)
        wide.commit()
        assert_matches(together, case, starts, [4, 4, 4])
        for offset in range(4):
            alone = run_pass(single, [1, 1, 1], width, is_fixed=True)
            single.commit()
            for a, b in zip(alone, together, strict=True):
                assert torch.equal(a[:, 0], b[:, offset])


@pytest.mark.parametrize("kept", [[0, 0, 0], [1, 3, 0], [5, 2, 4]])
@pytest.mark.parametrize("commit", [False, True])
def test_reject_then_go_on_equals_a_fresh_run(case: StoreCase, kept: list[int], commit: bool) -> None:
    starts = [7, 12, 3]
    rolled, fresh = prefilled(case, starts), prefilled(case, starts)
    grown = [start + keep for start, keep in zip(starts, kept, strict=True)]
    for cache in (rolled, fresh):
        run_pass(cache, kept, 5)
    # the rejected rest of the draft
    run_pass(rolled, [5 - keep for keep in kept], 5, source=JUNK)
    rolled.roll_back(grown)
    if commit:
        rolled.commit()
        fresh.commit()
    for counts in ([1, 1, 1], [4, 2, 0], [2, 3, 4]):
        outputs = run_pass(rolled, counts, max(counts))
        assert_same_bits(outputs, run_pass(fresh, counts, max(counts)), counts)
        assert_matches(outputs, case, grown, counts)
        grown = [length + count for length, count in zip(grown, counts, strict=True)]


def test_many_rounds_of_rejection(case: StoreCase) -> None:
    """Commits after each round, as decoding does: long enough for any store to pack blocks of 16."""
    rolled, fresh = prefilled(case, [3, 9, 14]), prefilled(case, [3, 9, 14])
    lengths = [3, 9, 14]
    for step in range(12):
        kept = [1 + (step + row) % 3 for row in range(3)]
        junk = [6 - keep for keep in kept]
        for cache in (rolled, fresh):
            run_pass(cache, kept, 6)
        run_pass(rolled, junk, 6, source=JUNK)
        lengths = [length + keep for length, keep in zip(lengths, kept, strict=True)]
        for cache in (rolled, fresh):
            cache.roll_back(lengths)
            cache.commit()
        assert_same_bits(run_pass(rolled, [1, 1, 1], 1), run_pass(fresh, [1, 1, 1], 1), [1, 1, 1])
        for cache in (rolled, fresh):
            cache.roll_back(lengths)


def test_padding_touches_no_token(case: StoreCase) -> None:
    """Rows that are empty, in the middle and full, in a pass where they read nothing."""
    starts = [0, 20, CAPACITY]
    cache, untouched = KVCache(case.build(shape())), KVCache(case.build(shape()))
    for one in (cache, untouched):
        for slot in (1, 2):
            run_pass(one, [starts[slot]], starts[slot], [slot], first_slot=slot)
    run_pass(cache, [0, 0, 0], 7)
    assert cache.lengths == starts
    for one in (cache, untouched):
        one.roll_back([0, 20, CAPACITY - 1])
    outputs = run_pass(cache, [1, 1, 1], 1)
    assert_same_bits(outputs, run_pass(untouched, [1, 1, 1], 1), [1, 1, 1])
    assert_matches(outputs, case, [0, 20, CAPACITY - 1], [1, 1, 1])


@pytest.mark.parametrize("width", [1, 3, 33])
def test_stale_slots_are_never_seen(case: StoreCase, width: int) -> None:
    """Huge numbers wherever a rejected token can leave them: the bits of a buffer that never saw them."""
    huge = Texts(seed=2)
    huge.keys.mul_(1e30)
    huge.values.mul_(1e30)
    starts = [7, 12, 3]
    dirty = KVCache(case.build(shape()))
    run_pass(dirty, [CAPACITY] * 3, CAPACITY, source=huge)
    for slot in range(NUM_SLOTS):
        dirty.release(slot)
    clean = KVCache(case.build(shape()))
    for cache in (dirty, clean):
        for slot, length in enumerate(starts):
            run_pass(cache, [length], length, [slot], first_slot=slot)
    counts = [width, max(1, width - 2), width]
    outputs = run_pass(dirty, counts, width)
    assert_same_bits(outputs, run_pass(clean, counts, width), counts)
    assert_matches(outputs, case, starts, counts)


def test_identical_rows_get_identical_outputs(case: StoreCase) -> None:
    cache = KVCache(case.build(shape()))
    for slot in range(NUM_SLOTS):
        run_pass(cache, [9], 9, [0], first_slot=slot)
    for output in run_pass(cache, [4, 4, 4], 4, texts=(0, 0, 0)):
        torch.testing.assert_close(output, output[:1].expand_as(output), rtol=0, atol=1e-14)


def test_a_moved_row_goes_on_as_if_it_had_stayed(case: StoreCase) -> None:
    moved, stayed = prefilled(case, [5, 9, 20]), prefilled(case, [5, 9, 20])
    moved.commit()
    stayed.commit()
    moved.release(0)
    moved.move(2, 0)
    assert moved.lengths == [20, 9, 0]
    counts = [3, 2]
    outputs = run_pass(moved, counts, 3, texts=(2, 1))
    reference = run_pass(stayed, [1, 2, 3], 3)
    for a, b in zip(outputs, reference, strict=True):
        assert torch.equal(a[0], b[2])
        assert torch.equal(a[1, :2], b[1, :2])


@pytest.mark.parametrize("commit", [False, True])
def test_a_moved_row_outlives_a_long_prompt_in_the_slot_that_it_left(case: StoreCase, commit: bool) -> None:
    """Whatever room a store makes for the prompt, before the moved row has its next pass."""
    cache = prefilled(case, [5, 9, 20])
    if commit:
        cache.commit()
    cache.release(0)
    cache.move(2, 0)
    run_pass(cache, [CAPACITY], CAPACITY, [1], first_slot=2)
    outputs = run_pass(cache, [3, 2], 3, texts=(2, 1))
    assert_matches(outputs, case, [20, 9], [3, 2], texts=(2, 1))


def test_a_slot_that_was_released_starts_anew(case: StoreCase) -> None:
    used, fresh = prefilled(case, [30, 9, 20]), prefilled(case, [4, 9, 20])
    used.commit()
    used.release(0)
    run_pass(used, [4], 4, [0])
    for cache in (used, fresh):
        cache.commit()
    counts = [3, 1, 2]
    assert_same_bits(run_pass(used, counts, 3), run_pass(fresh, counts, 3), counts)


def test_the_capacity_is_a_limit(case: StoreCase) -> None:
    cache = prefilled(case, [CAPACITY - 1])
    assert_matches(run_pass(cache, [1], 1, [0]), case, [CAPACITY - 1], [1])
    with pytest.raises(ValueError, match=f"capacity is {CAPACITY}"):
        run_pass(cache, [1], 1, [0])


def test_bytes(case: StoreCase) -> None:
    cache = prefilled(case, [5, 9, 20])
    store = cache.store
    assert store.bytes_per_token > 0
    assert store.live_bytes([0, 0, 0]) == 0
    assert 0 < store.live_bytes([5, 0, 0]) < store.live_bytes([5, 9, 20]) <= store.allocated_bytes()
    assert store.live_bytes([CAPACITY] * NUM_SLOTS) <= store.allocated_bytes()
    cache.commit()
    before = store.allocated_bytes()
    run_pass(cache, [1, 1, 1], 1)
    cache.commit()
    assert store.allocated_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_bytes_by_hand(dtype: torch.dtype) -> None:
    store = DenseOptions().build(shape(dtype))
    per_token = 2 * NUM_LAYERS * KV_HEADS * HEAD_DIM * dtype.itemsize
    assert store.live_bytes([5, 0, 2]) == 7 * per_token
    assert store.allocated_bytes() == NUM_SLOTS * (CAPACITY + 1) * per_token  # one spare position per row


def test_the_dense_store_pads_into_the_spare_slot_only() -> None:
    store = DenseOptions().build(shape())
    cache = KVCache(store)
    run_pass(cache, [2, 0, 5], 5)
    for buffer in (store._keys, store._values):
        touched = (buffer != 0).any(-1).all(2).all(0)  # [S, capacity + 1]
        assert touched.nonzero().tolist() == [
            *([0, n] for n in (0, 1, CAPACITY)),
            [1, CAPACITY],
            *([2, n] for n in range(5)),
        ]
    assert math.isfinite(store._values.abs().max().item())
