"""Tiny random models of each family, built from a configuration: real architectures, milliseconds per pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 61
CONTEXT_LENGTH = 128

_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
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
    if family in ("qwen3",):
        sizes["head_dim"] = 8
    if family == "mistral":
        sizes["sliding_window"] = None
    config = _CONFIGS[family](**(sizes | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def random_prompts(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop_ids: list[int] | None = None
) -> list[int]:
    """transformers' own greedy generate: the new tokens."""
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )
    return output[0, len(prompt) :].tolist()
