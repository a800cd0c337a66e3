"""Quantized stores from the inside: what is refused, packed once, grown and shrunk (test_kv_stores: the contract)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.kv import sealed_groups
from quant.kv.base import KVOptions, PackedBuffer
from quant.kv.kv_int2 import KVInt2
from quant.kv.kv_int4 import KVInt4
from quant.kv.kv_int8 import KVInt8
from quant.kv.per_token import PerTokenOptions
from quant.kv.sealed_groups import Seal, SealedGroupsOptions, SealedGroupsStore
from specdec.attention import AttentionRule
from specdec.kv_cache import CacheShape, KVCache

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYERS, SLOTS, HEADS, CAPACITY, HEAD_DIM = 2, 2, 2, 60, 8


def shape(
    longest_pass: int | None = 4, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float64
) -> CacheShape:
    return CacheShape(LAYERS, SLOTS, HEADS, CAPACITY, head_dim, dtype, CPU, longest_pass)


def numbers(count: int, seed: int, head_dim: int = HEAD_DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SLOTS, HEADS, count, head_dim, generator=generator, dtype=torch.float64)


def run_pass(cache: KVCache, counts: Sequence[int], seed: int = 0, first_slot: int = 0) -> list[Tensor]:
    layout = cache.layout(first_slot, counts, max(counts))
    outputs = []
    for layer in range(LAYERS):
        keys, values, query = (
            numbers(layout.width, 3 * (100 * seed + sum(layout.starts)) + i)[: len(counts)] for i in range(3)
        )
        cache.store.write(layer, layout, keys, values)
        outputs.append(cache.store.attend(layer, query, layout, AttentionRule(1.0)))
    cache.advance(layout)
    return outputs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerTokenOptions(key_bits=3), r"kv.key_bits=3: expected one of 2, 4, 8"),
        (lambda: PerTokenOptions(value_bits=1), r"kv.value_bits=1: expected one of 2, 4, 8"),
        (lambda: KVInt4(value_bits=16), r"kv.value_bits=16: expected one of 2, 4, 8"),
        (lambda: PerTokenOptions(group=-1), r"kv.group=-1: expected at least 1, or 0"),
        (lambda: KVInt4(block=0), r"kv.block=0: expected at least 1"),
        (lambda: KVInt4(tail=0), r"kv.tail=0: expected at least 1"),
        (lambda: KVInt4(sink=-1), r"kv.sink=-1: expected at least 0"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "head_dim", "message"),
    [
        (PerTokenOptions(group=48), 64, "kv.group=48: .*a head of 64.*nearest: 32 or 64$"),
        (PerTokenOptions(4, 2, group=2), 64, "kv.group=2: .*codes of 2 bits; nearest: 4$"),
        (PerTokenOptions(group=128), 64, "kv.group=128: .*nearest: 64$"),
        (PerTokenOptions(2, 8), 6, "heads of 6 numbers .*codes of 2 bits; choose more bits .*kv=dense"),
        (KVInt4(group=24), 80, "kv.group=24: .*nearest: 20 or 40$"),
        (KVInt2(value_bits=8), 6, "kv.key_bits=2: a head of 6 numbers does not fill whole bytes"),
        (KVInt4(tail=3), 64, r"kv.tail=3: .* up to 4 tokens \(draft_length.max \+ 1, .*\): at least 4$"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_a_line(
    options: KVOptions, head_dim: int, message: str
) -> None:
    for ask in (options.check, options.build):
        with pytest.raises(ValueError, match=message) as caught:
            ask(shape(head_dim=head_dim))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head_dim", [4, 12, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("options", [KVInt8(), KVInt4(), KVInt2()])
def test_heads_of_known_models_fit(options: KVOptions, head_dim: int) -> None:
    options.check(shape(head_dim=head_dim))
    assert options.build(shape(head_dim=head_dim)).allocated_bytes() > 0


def test_a_tail_holds_a_pass_exactly() -> None:
    assert KVInt4(tail=4).build(shape(longest_pass=4)).allocated_bytes()
    assert KVInt4(tail=1).build(shape(longest_pass=None)).allocated_bytes()


def test_the_seal_by_hand() -> None:
    seal = Seal(sink=0, block=4, tail=6)
    assert [seal.packed(position) for position in (0, 6, 9, 10, 13, 14, 20)] == [0, 0, 0, 4, 4, 8, 12]
    assert seal.first_packed(torch.tensor([0, 3, 4, 7, 8])).tolist() == [10, 10, 14, 14, 18]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_buffer_reads_what_it_wrote(bits: int, dtype: torch.dtype) -> None:
    buffer = PackedBuffer((3, 5), (4, 8), -2, bits, dtype, CPU)
    values = torch.randn(5, 4, 8, dtype=torch.float64).to(dtype)
    buffer.write((1, slice(None)), values)
    assert buffer._packed.scales.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    found = buffer.read((1, slice(None)))
    assert found.dtype == dtype
    assert torch.equal(found, buffer.as_read(values))
    step = (values.amax(-2) - values.amin(-2)).max().item() * 1.02 / (2**bits - 1)
    assert (found - values).abs().max().item() <= step * (1.2 if bits == 8 else 0.55) + 0.02 * (
        dtype.itemsize == 2
    )
    out = torch.empty_like(found)
    buffer.read((1, slice(None)), out=out)
    assert torch.equal(out, found)
    assert not buffer.read((0, slice(None))).any()
    buffer.copy((1, 4), (2, 0))
    assert torch.equal(buffer.read((2, 0)), found[4])
    assert buffer.nbytes == 15 * buffer.unit_bytes == 15 * (4 * bits + 8 * 2 * (1 if bits == 8 else 2))


def packed_bits(store: SealedGroupsStore) -> list[Tensor]:
    return [
        tensor.clone()
        for buffer in (store._keys, store._values)
        for tensor in (buffer._packed.codes, buffer._packed.scales, buffer._packed.lows)
        if tensor is not None
    ]


def test_a_block_is_packed_once_in_commit_and_never_again() -> None:
    store = KVInt4(block=4, tail=6).build(shape())
    cache = KVCache(store)
    run_pass(cache, [9, 9])
    cache.commit()
    held = [9, 9]
    for step in range(1, 12):
        before = packed_bits(store)
        run_pass(cache, [4, 3], seed=step)
        assert all(map(torch.equal, before, packed_bits(store)))  # not while tokens may be rejected
        kept = [1 + step % 4, 1 + step % 3]
        held = [length + keep for length, keep in zip(held, kept, strict=True)]
        cache.roll_back(held)
        assert all(map(torch.equal, before, packed_bits(store)))
        packed = list(store._packed)
        cache.commit()
        for old, new in zip(before, packed_bits(store), strict=True):
            for slot in range(SLOTS):
                done = packed[slot] // 4
                assert torch.equal(old[:, slot, :, :done], new[:, slot, :, :done])
                assert store._packed[slot] == (held[slot] - 6) // 4 * 4
                assert not new[:, slot, :, store._packed[slot] // 4 :].any()
    assert store._packed[0] >= 16


def test_rejected_tokens_touch_no_scale() -> None:
    """Drafts of huge numbers, at every place relative to the borders of blocks."""
    options = KVInt4(block=4, tail=4)
    used, clean = (KVCache(options.build(shape())) for _ in range(2))
    for step in range(40):
        for cache in (used, clean):
            run_pass(cache, [1, 1], seed=step)
        layout = used.layout(0, [3, 3], 3)
        for layer in range(LAYERS):
            huge = 1e30 * numbers(3, step)
            used.store.write(layer, layout, huge, huge)
            used.store.attend(layer, huge, layout, AttentionRule(1.0))
        used.advance(layout)
        used.roll_back([step + 1, step + 1])
        for cache in (used, clean):
            cache.commit()
    assert isinstance(used.store, SealedGroupsStore)
    assert isinstance(clean.store, SealedGroupsStore)
    assert used.store._packed == [36, 36]
    assert all(map(torch.equal, packed_bits(used.store), packed_bits(clean.store)))


def test_a_long_prompt_is_dense_until_it_is_committed() -> None:
    store = KVInt4(block=4, tail=6).build(shape())
    cache = KVCache(store)
    small = store.allocated_bytes()
    run_pass(cache, [50])
    assert store._ring == 50
    assert store.allocated_bytes() > small
    cache.commit_slot(0)
    assert (store._ring, store._packed) == (6 + 4 - 1 + 4, [44, 0])
    assert store.allocated_bytes() == small


def test_a_text_that_left_takes_no_room() -> None:
    store = KVInt4(block=4, tail=6).build(shape())
    cache = KVCache(store)
    small = store.allocated_bytes()
    for slot in range(SLOTS):
        run_pass(cache, [50], first_slot=slot)
        cache.commit_slot(slot)
    cache.release(0)
    run_pass(cache, [3], first_slot=1)
    assert store.allocated_bytes() == small
    cache.move(1, 0)
    run_pass(cache, [3])
    assert store.allocated_bytes() == small


def test_uncommitted_tokens_of_another_row_outlive_a_commit() -> None:
    """Row 1 reads a long text that is not final while row 0 is committed and its part of the ring would shrink."""
    options = KVInt4(block=4, tail=6)
    together, alone = KVCache(options.build(shape())), KVCache(options.build(shape()))
    for cache in (together, alone):
        run_pass(cache, [30], first_slot=1)
    run_pass(together, [20])
    together.commit_slot(0)
    for cache in (together, alone):
        cache.commit_slot(1)
    outputs = [run_pass(cache, [2], seed=7, first_slot=1) for cache in (together, alone)]
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("part", [1, 5, 16])
@pytest.mark.parametrize("counts", [[50], [50, 37], [0, 50]])
def test_a_long_prompt_attends_in_parts(
    part: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = KVInt4(block=4, tail=6, sink=3)
    whole = run_pass(KVCache(options.build(shape())), counts)
    monkeypatch.setattr(sealed_groups, "PART", part)
    parts = run_pass(KVCache(options.build(shape())), counts)
    for a, b in zip(whole, parts, strict=True):
        for row, count in enumerate(counts):
            torch.testing.assert_close(a[row, :count], b[row, :count], rtol=0, atol=1e-12)


def test_going_back_behind_what_is_packed_is_refused() -> None:
    cache = KVCache(KVInt4(block=4, tail=4).build(shape()))
    run_pass(cache, [30, 30])
    cache.commit()
    cache.roll_back([29, 28])
    run_pass(cache, [1, 1])  # the same blocks are packed at 28 to 31 tokens
    cache.roll_back([30, 27])
    with pytest.raises(ValueError, match="slot 1 goes on behind 27 tokens, but more were committed"):
        run_pass(cache, [1, 1])


def test_a_sink_beyond_the_capacity_is_all_dense() -> None:
    store = SealedGroupsOptions(sink=1000).build(shape(longest_pass=1))
    cache = KVCache(store)
    run_pass(cache, [CAPACITY - 1, 3])
    cache.commit()
    run_pass(cache, [1, 1])
    assert store._packed == [0, 0]
    assert store.live_bytes([CAPACITY, 0]) == CAPACITY * store._dense_bytes
