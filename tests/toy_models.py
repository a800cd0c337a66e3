"""Tiny random models of each family, built from a configuration: real architectures, milliseconds per pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from specdec.types import SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt")
GROUPED_FAMILIES = tuple(family for family in FAMILIES if family not in ("gpt2", "gpt_neox", "opt"))
# Those whose layers are a list `model.layers` of one kind.
UNIFORM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
GREEDY = SamplingParams()
VOCAB_SIZE = 61
CONTEXT_LENGTH = 128

_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
    "gpt2": GPT2Config,
    "gpt_neox": GPTNeoXConfig,
    "opt": OPTConfig,
}
# What differs from a Llama's sizes. A window of 6 is shorter than most texts of the tests.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "phi3": {"sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


def tiny_model(
    family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """A random model with grouped-query attention, wide enough in scale that its greedy texts do not loop at once."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family not in GROUPED_FAMILIES:  # every head has keys of its own
        del sizes["num_key_value_heads"]
    config = _CONFIGS[family](**(sizes | _OWN_SIZES.get(family, {}) | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def random_prompts(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    stop_ids: list[int] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """transformers' own greedy generate: the new tokens."""
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        **_as_generate_says(sampling, stop_ids, max_new_tokens),
    )
    return output[0, len(prompt) :].tolist()


def _as_generate_says(
    sampling: SamplingParams, stop_ids: list[int] | None, max_new_tokens: int
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if sampling.repetition_penalty != 1:
        options["repetition_penalty"] = sampling.repetition_penalty
    if sampling.bad_words:
        options["bad_words_ids"] = [list(word) for word in sampling.bad_words]
    if sampling.min_new_tokens and stop_ids:
        options["min_new_tokens"] = min(sampling.min_new_tokens, max_new_tokens)  # it warns of more
    if sampling.logit_bias:
        options["sequence_bias"] = [[[token], bias] for token, bias in sampling.logit_bias]
    return options
