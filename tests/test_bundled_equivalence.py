"""The headline on the real model: speculative output is greedy output, token for token, in float32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import specdec
from experiments.bundled_model import fetch
from experiments.workloads.base import WorkloadContext, encode
from experiments.workloads.embedded import EmbeddedWorkload
from quant.weights.bnb_nf4 import BnbNf4Weights
from specdec.generation import generate, generate_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(fetch(), dtype=torch.float32)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return BnbNf4Weights().convert(AutoModelForCausalLM.from_pretrained(fetch(), dtype=torch.float32))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(fetch())


def real_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    prompts = EmbeddedWorkload(limit=count).load(WorkloadContext(len(tokenizer), 0))
    return [encode(prompt, tokenizer) for prompt in prompts]


@pytest.fixture(scope="module")
def greedy(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The baseline's answers to 8 prompts, one category each, one at a time."""
    return generate(target, real_prompts(tokenizer, 8), max_new_tokens=NEW_TOKENS, num_slots=1)


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_speculative_output_is_greedy_output(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    greedy: list[list[int]],
    drafter: str,
    num_slots: int,
) -> None:
    chosen = draft if drafter == "draft_model" else specdec.PromptLookupOptions()
    prompts = real_prompts(tokenizer, 8)
    steps = list(
        generate_steps(target, prompts, drafter=chosen, max_new_tokens=NEW_TOKENS, num_slots=num_slots)
    )
    answers: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for request_id, tokens in zip(step.request_ids, step.committed, strict=True):
            answers[request_id].extend(tokens)
    assert answers == greedy
    assert sum(sum(step.accepted) for step in steps) > 0  # else nothing was speculative


@pytest.mark.sample
def test_greedy_output_is_that_of_transformers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, greedy: list[list[int]]
) -> None:
    for prompt, answer in list(zip(real_prompts(tokenizer, 8), greedy, strict=True))[:4]:
        inputs = torch.tensor([prompt])
        output = target.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert output[0, len(prompt) :].tolist() == answer
