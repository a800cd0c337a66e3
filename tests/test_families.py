"""Each known model family against transformers' own forward and generate."""

from __future__ import annotations

import pytest
import torch
from toy_models import FAMILIES, GROUPED_FAMILIES, greedy_reference, random_prompts, tiny_model

from specdec import ModelRunner, PromptLookupOptions, generate
from specdec.hf_adapter import KNOWN_FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-4}
# Its attention in transformers takes the softmax in float32 whatever the model's dtype.
GEMMA2_TOLERANCE = 1e-5

every_family = pytest.mark.parametrize("family", FAMILIES)
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def test_the_toy_models_cover_every_known_family() -> None:
    assert set(FAMILIES) == set(KNOWN_FAMILIES)


@every_family
@tied_or_not
@dtypes
def test_forward_equals_transformers(family: str, tied: bool, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype, tie_word_embeddings=tied)
    text = random_prompts([40])[0]
    with torch.no_grad():
        reference = model(torch.tensor([text])).logits[0]
    runner = ModelRunner(model, 1, 40)
    logits = [
        runner.prefill([text[:20]], [0]),
        runner.decode(torch.tensor([text[20:21]])),
        runner.verify(torch.tensor([text[21:40]]), [19])[0],
    ]
    assert logits[0].dtype == dtype
    tolerance = max(TOLERANCE[dtype], GEMMA2_TOLERANCE if family == "gemma2" else 0.0)
    torch.testing.assert_close(torch.cat(logits), reference[19:], rtol=0, atol=tolerance)


@every_family
@tied_or_not
@dtypes
def test_greedy_equals_transformers_generate(family: str, tied: bool, dtype: torch.dtype) -> None:
    """Prompts of unequal length, fewer slots than prompts; plain and speculative."""
    model = tiny_model(family, seed=1, dtype=dtype, tie_word_embeddings=tied)
    prompts = random_prompts([3, 9, 17, 1, 6], seed=2)
    references = [greedy_reference(model, prompt, 10) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=10) == references
    assert generate(model, prompts, max_new_tokens=10, num_slots=2) == references
    draft = tiny_model(family, seed=2, dtype=dtype, tie_word_embeddings=tied)
    assert generate(model, prompts, max_new_tokens=10, num_slots=3, drafter=draft) == references
    assert generate(model, prompts, max_new_tokens=10, drafter=PromptLookupOptions()) == references


@pytest.mark.parametrize("family", GROUPED_FAMILIES)
def test_one_head_per_group_and_one_group_for_all_heads(family: str) -> None:
    for num_kv_heads in (1, 4):
        model = tiny_model(family, seed=3, num_key_value_heads=num_kv_heads)
        prompt = random_prompts([11], seed=4)[0]
        assert generate(model, [prompt], max_new_tokens=8) == [greedy_reference(model, prompt, 8)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_head_dim_apart_from_the_hidden_size(family: str) -> None:
    model = tiny_model(family, head_dim=12)
    prompt = random_prompts([11], seed=4)[0]
    assert generate(model, [prompt], max_new_tokens=8) == [greedy_reference(model, prompt, 8)]


def test_a_draft_model_of_another_family() -> None:
    model = tiny_model("qwen3")
    prompts = random_prompts([4, 12])
    references = [greedy_reference(model, prompt, 9) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=9, drafter=tiny_model("mistral")) == references
