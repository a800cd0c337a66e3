"""Tiny models saved as folders that `from_pretrained` reads, with a tokenizer of one word per token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from toy_models import VOCAB_SIZE, random_prompts, tiny_model
from transformers import PreTrainedTokenizerFast

EOS_ID = VOCAB_SIZE - 1


def words(token_ids: Sequence[int], prefix: str = "w") -> str:
    """The text that the tokenizer of `save_tokenizer` reads as these ids."""
    return " ".join(f"{prefix}{token}" for token in token_ids)


def save_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE, prefix: str = "w") -> None:
    vocabulary = {f"{prefix}{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    eos = f"{prefix}{vocab_size - 1}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)


def save_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A tiny Llama in float32 that ends its texts with the vocabulary's last token."""
    sizes = {"eos_token_id": EOS_ID, **overrides}
    tiny_model("llama", seed=seed, dtype=torch.float32, **sizes).save_pretrained(folder)
    save_tokenizer(folder, sizes.get("vocab_size", VOCAB_SIZE))
    return folder


def save_prompts(
    file: Path, prompts: Sequence[Sequence[int]], categories: Sequence[str] | None = None
) -> Path:
    """A file for `workload=jsonl`, in which categories take turns where there are any."""
    lines = []
    for number, prompt in enumerate(prompts):
        category = {} if categories is None else {"category": categories[number % len(categories)]}
        lines.append(json.dumps({"prompt": words(prompt), **category}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def repeating_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Random prompts each said twice, so that a lookup drafter finds something to copy."""
    return [prompt * 2 for prompt in random_prompts(list(lengths), seed=seed, vocab_size=EOS_ID)]
