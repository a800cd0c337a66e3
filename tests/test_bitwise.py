"""`exactness=bitwise`: passes of one shape give the same logits, bit for bit, whatever else is in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toy_engine import CPU, Keeping, build_decoder, collect, model_drafter, requests_for
from toy_models import random_prompts, tiny_model
from transformers import PreTrainedModel

from quant.kv.base import KVOptions
from quant.kv.per_token import PerTokenOptions
from quant.kv.sealed_groups import SealedGroupsOptions
from specdec.drafters.base import Drafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.kv_cache import CacheShape, KVStore
from specdec.kv_stores.dense import DenseStore
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")
K = 4
PASS_TOKENS = 8  # float32 on two threads: a kernel's last rows, beyond a multiple of 4, round differently
# Rows of activations fill whole vectors: where a row ends inside one, float32 elementwise functions round otherwise.
WIDE = {"hidden_size": 64, "intermediate_size": 64}


def texts_and_logits(
    model: PreTrainedModel,
    drafter: Drafter | None,
    num_slots: int,
    pass_tokens: int | None,
    chunk: int | None,
    make_store: Callable[[CacheShape], KVStore] = DenseStore,
) -> tuple[dict[int, list[int]], Keeping]:
    prompts = random_prompts([3, 17, 9, 12, 5])
    runner = ModelRunner(
        model, num_slots, 48, prefill_chunk=chunk, pass_tokens=pass_tokens, make_store=make_store
    )
    sampler = Keeping()
    decoder = build_decoder(runner, num_slots=num_slots, drafter=drafter, draft_length=K, sampler=sampler)
    return collect(decoder.generate(requests_for([p * 2 for p in prompts], [14, 9, 12, 5, 14]))), sampler


def check_bits(
    model: PreTrainedModel,
    num_slots: int,
    chunk: int | None,
    kind: str,
    make_store: Callable[[CacheShape], KVStore] = DenseStore,
) -> tuple[dict[int, list[int]], int]:
    drafter: Drafter
    drafter = PromptLookupDrafter(1, 3, CPU) if kind == "lookup" else model_drafter(model, num_slots, 48)
    twin, plain = texts_and_logits(model, None, num_slots, PASS_TOKENS, chunk, make_store)
    texts, speculative = texts_and_logits(model, drafter, num_slots, PASS_TOKENS, chunk, make_store)
    assert texts == twin
    compared = 0
    for key, logits in plain.seen.items():
        assert torch.equal(speculative.seen[key], logits), key
        compared += 1
    return texts, compared


@pytest.mark.parametrize("kind", ["lookup", "model"])
@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_speculative_logits_are_the_twins_bit_for_bit(
    kind: str, num_slots: int, chunk: int | None, dtype: torch.dtype
) -> None:
    model = tiny_model("llama", dtype=dtype, **WIDE)
    _, compared = check_bits(model, num_slots, chunk, kind)
    assert compared == 14 + 9 + 12 + 5 + 14


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        PerTokenOptions(),
        PerTokenOptions(4, 2, group=8),
        SealedGroupsOptions(block=4, tail=PASS_TOKENS, sink=1),
    ],
    ids=["per_token_8", "per_token_4_2", "sealed_groups"],
)
def test_over_quantized_caches_too(options: KVOptions, num_slots: int, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype, **WIDE)
    _, compared = check_bits(model, num_slots, 8, "lookup", options.build)
    assert compared == 14 + 9 + 12 + 5 + 14


def test_a_padded_pass_computes_what_a_plain_one_does() -> None:
    model = tiny_model("llama")  # float64
    plain, _ = texts_and_logits(model, None, 3, None, None)
    assert texts_and_logits(model, None, 3, PASS_TOKENS, None)[0] == plain


def test_a_pass_that_is_too_wide_is_refused() -> None:
    runner = ModelRunner(tiny_model("llama"), 1, 20, pass_tokens=2)
    runner.prefill([[1, 2]], [0])
    with pytest.raises(ValueError, match="3 tokens per row, but pass_tokens=2"):
        runner.verify(torch.zeros(1, 3, dtype=torch.long), [3])
