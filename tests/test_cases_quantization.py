"""Faults that others shipped in quantized caches (Q1 to Q3, Q8, Q10, Q11, Q13, Q14), each on the smallest input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_engine import build_decoder, collect, model_drafter, requests_for
from toy_models import FAMILIES, random_prompts, tiny_model
from transformers import PreTrainedModel

from quant.kv.base import KVOptions
from quant.kv.kv_int2 import KVInt2
from quant.kv.kv_int4 import KVInt4
from quant.kv.kv_int8 import KVInt8
from quant.kv.per_token import PerTokenOptions
from quant.kv.sealed_groups import SealedGroupsOptions, SealedGroupsStore
from specdec.kv_cache import CacheShape, PassLayout
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD_DIM = 8  # of the toy models
# Blocks small enough that texts of some tens of tokens seal several.
STORES: dict[str, KVOptions] = {
    "kv_int8": KVInt8(),
    "kv_int4": KVInt4(block=4, tail=6),
    "kv_int2": KVInt2(block=4, tail=6, sink=2),
}
every_store = pytest.mark.parametrize("kind", STORES)


@cache
def toy(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family)


def runner(kind: str, num_slots: int, capacity: int = 60, family: str = "llama", **more: Any) -> ModelRunner:
    return ModelRunner(toy(family), num_slots, capacity, make_store=STORES[kind].build, **more)


def read(one: ModelRunner, texts: Sequence[Sequence[int]], counts: Sequence[int] | None = None) -> Tensor:
    """Append a text to each of the first rows, padded: logits `[B, T, V]`."""
    counts = [len(text) for text in texts] if counts is None else counts
    width = max(map(len, texts))
    return one.verify(torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]), counts)


@every_store
def test_q1_dropping_and_selecting_rows(kind: str) -> None:
    """Prefill 10, append 5, drop 3; then rows 0 and 2 of 4 go on."""
    prompts, more, after = (random_prompts([n] * 4, seed=n) for n in (10, 5, 3))
    used, fresh = runner(kind, 4), runner(kind, 4)
    used.prefill(prompts, range(4))
    read(used, more)
    used.commit([12] * 4)
    assert used.lengths == (12, 12, 12, 12)
    used.release(1)
    used.move(2, 1)
    used.release(3)
    assert used.lengths == (12, 12, 0, 0)
    for slot, row in enumerate((0, 2)):
        fresh.prefill([prompts[row]], [slot])
    read(fresh, [more[0][:2], more[2][:2]])
    fresh.commit([12, 12])
    found, expected = (read(one, [after[0], after[2]]) for one in (used, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class HugeFirstKey:
    """A store whose texts all begin with a key many times as long as the others."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, layer: int, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        first = (layout.positions == 0)[:, None, :, None]
        self._store.write(layer, layout, torch.where(first, 40 * keys, keys), values)


def test_q2_a_huge_first_key_crushes_its_block_unless_it_is_a_sink() -> None:
    prompt = random_prompts([40])[0]

    def law(options: SealedGroupsOptions) -> Tensor:
        one = ModelRunner(
            toy(),
            1,
            41,
            make_store=lambda shape: HugeFirstKey(options.build(shape)),
        )
        return one.prefill([prompt], [0])[0].log_softmax(-1)

    dense = law(SealedGroupsOptions(sink=41))
    kl = {
        sink: float(
            (dense.exp() * (dense - law(SealedGroupsOptions(4, 8, block=32, tail=2, sink=sink)))).sum()
        )
        for sink in (0, 1)
    }
    assert 0 < kl[1] < kl[0] / 10


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("quant"):
        for one in vars(value).values():
            yield from tensors_of(one)


def storage_walk(store: object) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_of(store)}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class Sizes:
    """Of the bundled model, but for its layers."""

    layers: int = 2
    heads: int = 3
    head_dim: int = 64
    slots: int = 2
    capacity: int = 512

    def shape(self, dtype: torch.dtype) -> CacheShape:
        return CacheShape(
            self.layers, self.slots, self.heads, self.capacity, self.head_dim, dtype, torch.device("cpu"), 5
        )

    def dense_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("options", "most", "by_hand"),
    [
        (KVInt8(), 0.6, 2 * (64 + 2)),  # a scale of 16 bits per head and token
        (KVInt4(), 0.4, (32 + 64 * 4 / 32) + (32 + 4)),  # two of them per channel and 32 keys; per value
        (KVInt2(), 0.3, (16 + 64 * 4 / 32) + (16 + 4)),
        (KVInt4(group=16), 0.45, (32 + 64 * 4 / 32) + (32 + 4 * 4)),
    ],
)
def test_q3_bytes_are_those_of_the_storages_scales_included(
    options: KVOptions, most: float, by_hand: float, dtype: torch.dtype
) -> None:
    sizes = Sizes()
    store = options.build(sizes.shape(dtype))
    dense = sizes.dense_token(dtype)
    assert storage_walk(store) == store.allocated_bytes()
    assert store.allocated_bytes() < most * dense * sizes.slots * sizes.capacity
    assert store.bytes_per_token == sizes.layers * sizes.heads * by_hand
    assert store.bytes_per_token / dense < most * 2 / dtype.itemsize
    assert store.live_bytes([0, 0]) == 0
    one_token = dense if isinstance(store, SealedGroupsStore) else store.bytes_per_token
    assert store.live_bytes([1, 0]) == store.live_bytes([0, 1]) == one_token
    more = store.live_bytes([320, 7]) - store.live_bytes([288, 7])
    assert more == 32 * store.bytes_per_token


@pytest.mark.parametrize(
    ("options", "head_dim", "by_hand"),
    [
        (PerTokenOptions(), 20, (20 + 2) + (20 + 2)),
        (PerTokenOptions(4, 2, group=4), 12, (6 + 3 * 4) + (3 + 3 * 4)),
        (PerTokenOptions(8, 4, group=40), 80, (80 + 2 * 2) + (40 + 2 * 4)),
        (SealedGroupsOptions(8, 2, block=3, tail=5, group=4), 12, (12 + 12 * 2 / 3) + (3 + 3 * 4)),
        (SealedGroupsOptions(2, 8, block=7, tail=6, sink=5), 20, (5 + 20 * 4 / 7) + (20 + 2)),
        (SealedGroupsOptions(4, 4, block=1, tail=5, group=20), 80, (40 + 80 * 4) + (40 + 4 * 4)),
    ],
)
def test_q3_bytes_where_heads_groups_and_blocks_are_odd(
    options: KVOptions, head_dim: int, by_hand: float
) -> None:
    sizes = Sizes(head_dim=head_dim, capacity=67)
    store = options.build(sizes.shape(torch.bfloat16))
    heads = sizes.layers * sizes.heads
    assert store.bytes_per_token == pytest.approx(heads * by_hand)
    held, dense = sizes.slots * (67 + 1), 0  # one spare position per row
    if isinstance(options, SealedGroupsOptions):
        num_packed = (66 - options.sink - options.tail) // options.block * options.block
        held, ring = sizes.slots * num_packed, options.tail + options.block - 1 + 5
        dense = sizes.slots * (options.sink + ring + 1) * sizes.dense_token(torch.bfloat16)
    assert storage_walk(store) == store.allocated_bytes()
    assert store.allocated_bytes() == pytest.approx(held * heads * by_hand + dense)


def test_q3_live_bytes_by_hand() -> None:
    dtype = torch.bfloat16
    store = SealedGroupsOptions(4, 2, block=16, tail=10, sink=4).build(Sizes().shape(dtype))
    dense = Sizes().dense_token(dtype)
    block = 2 * 3 * (16 * 32 + 64 * 4 + 16 * (16 + 4))
    for length, blocks in ((1, 0), (29, 0), (30, 1), (45, 1), (46, 2), (512, 31), (511, 31)):
        # a block is sealed as soon as 10 dense tokens lie behind it
        assert store.live_bytes([length, 0]) == blocks * block + (length - 16 * blocks) * dense


@every_store
def test_q3_the_walk_holds_while_texts_grow_and_leave(kind: str) -> None:
    one = runner(kind, 2, longest_pass=3)
    store: Any = one.cache.store
    empty = storage_walk(store)
    for _ in range(2):
        one.prefill(random_prompts([31, 9]), [0, 1])
        assert storage_walk(store) == store.allocated_bytes() == empty
        for _ in range(9):
            read(one, [[1, 2, 3], [4, 5, 6]])
            one.commit([length - 1 for length in one.lengths])
            assert storage_walk(store) == store.allocated_bytes() == empty
            assert 0 < store.live_bytes(one.lengths) < empty
        one.release(0)
        one.move(1, 0)
        one.release(0)


@every_store
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_q8_rejected_tokens_leave_no_trace(kind: str, family: str) -> None:
    """Reject 0 to 6 of 6 drafts, far enough for several blocks to be sealed: the bits of a run that never saw them."""
    used, fresh = (runner(kind, 1, family=family, longest_pass=6) for _ in range(2))
    text = random_prompts([60])[0]
    for one in (used, fresh):
        one.prefill([text[:5]], [0])
        one.commit([5])
    for kept in (1, 3, 6, 2, 5, 4, 1, 6, 2, 6):
        start = used.lengths[0]
        tokens = text[start : start + kept]
        junk = [(token + 7) % 60 for token in text[start + kept : start + 6]]
        found = read(used, [[*tokens, *junk]])[:, :kept]
        used.commit([start + kept])
        # a pass of the same shape, its rest padding
        expected = read(fresh, [[*tokens, *junk]], [kept])[:, :kept]
        fresh.commit([start + kept])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    last = [one.decode(torch.tensor([[1]])) for one in (used, fresh)]
    assert torch.equal(*last)


def answers(kind: str, prompts: Sequence[Sequence[int]], limits: Sequence[int], num_slots: int) -> Any:
    """Plain, then speculative with a good and with a bad draft model."""
    found = []
    for drafter in (None, toy(), tiny_model("llama", seed=9)):
        draft = None if drafter is None else model_drafter(drafter, num_slots, 60)
        decoder = build_decoder(runner(kind, num_slots), num_slots=num_slots, drafter=draft, draft_length=5)
        found.append(collect(decoder.generate(requests_for(prompts, list(limits)))))
    assert found[1] == found[2] == found[0]
    return found[0]


@every_store
def test_q10_identical_prompts_get_identical_answers(kind: str) -> None:
    prompt = random_prompts([13])[0]
    found = answers(kind, [prompt] * 5, [12] * 5, num_slots=5)
    assert list(found.values()) == [found[0]] * 5
    assert answers(kind, [prompt], [12], num_slots=1)[0] == found[0]


@every_store
def test_q11_a_finished_row_leaves_the_others_as_they_are(kind: str) -> None:
    """The longest prompt stops first, its slot goes to a waiting one or is closed up."""
    prompts, limits = random_prompts([30, 4, 9]), [2, 14, 11]
    alone = {i: answers(kind, [prompts[i]], [limits[i]], 1)[0] for i in range(3)}
    for num_slots in (2, 3):
        assert answers(kind, prompts, limits, num_slots) == alone


@every_store
@pytest.mark.parametrize("family", FAMILIES)
def test_q13_chunks_store_and_compute_what_a_whole_prompt_does(kind: str, family: str) -> None:
    """Up to rounding in float64; in lower precision a number beside the border of two codes may take the other."""
    prompt = random_prompts([37])[0]
    whole = runner(kind, 1, family=family)
    first = whole.prefill([prompt], [0])
    after = whole.decode(torch.tensor([[5]]))
    for chunk in (1, 4, 7, 36):
        chunked = runner(kind, 1, family=family, prefill_chunk=chunk)
        torch.testing.assert_close(chunked.prefill([prompt], [0]), first, rtol=0, atol=1e-10)
        torch.testing.assert_close(chunked.decode(torch.tensor([[5]])), after, rtol=0, atol=1e-10)


@every_store
@pytest.mark.parametrize("length", [HEAD_DIM - 1, HEAD_DIM, HEAD_DIM + 1, 4 * HEAD_DIM])
def test_q14_prompts_about_as_long_as_a_head_is_wide(kind: str, length: int) -> None:
    prompt = random_prompts([length])[0]
    single, whole = runner(kind, 1), runner(kind, 1)
    single.prefill([prompt[:1]], [0])
    for number, token in enumerate(prompt[1:], 2):
        logits = single.decode(torch.tensor([[token]]))
        single.commit([number])
    torch.testing.assert_close(whole.prefill([prompt], [0]), logits, rtol=0, atol=1e-10)
