"""The only file that knows transformers' cache protocol, forward() keywords and configuration names.

Models are used unmodified: during a pass their attention implementation is switched to the one of
`specdec.attention`, which needs no mask from transformers, and their cache argument is a thin writer to our store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention import ATTENTION_NAME
from specdec.kv_cache import CacheShape, KVStore, PassLayout

# Families whose passes were compared with transformers' own forward and generate (tests/test_families.py).
KNOWN_FAMILIES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
)
# These change the rotation of cached keys as a text grows, so what a token's key is depends on its batch mates.
REFUSED_ROPE_TYPES = ("dynamic", "longrope")


class _StoreWriter:
    """What a model sees as its cache: `update` writes the pass's keys and values to the store."""

    is_compileable = False

    def __init__(self, store: KVStore, layout: PassLayout) -> None:
        self._store = store
        self._layout = layout

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        self._store.write(layer, self._layout, keys, values)
        return keys, values  # not looked at: attention reads the store

    def get_seq_length(self, layer: int = 0) -> int:
        """Some families build a default for positions from it, which ours replace."""
        return 0


def check_supported(config: Any, num_tokens: int) -> None:
    """Can a model of this configuration hold texts of `num_tokens` here? Needs no weights.

    Raises ValueError for a family that is not known to be right (by name), for what its configuration asks of attention
    that is not supported, and for a text beyond the model's context.
    """
    if config.model_type not in KNOWN_FAMILIES:
        raise ValueError(
            f"model family '{config.model_type}' is not known to be right in this engine; "
            f"known: {', '.join(KNOWN_FAMILIES)}"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in REFUSED_ROPE_TYPES:
        raise ValueError(f"rope_type '{rope_type}' rotates cached keys as the text grows: not supported")
    context_length = config.max_position_embeddings
    if num_tokens > context_length:
        raise ValueError(f"{num_tokens} tokens exceed the model's context of {context_length}")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise ValueError("reorder_and_upcast_attn is an attention of its own: not supported")
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"layers of kind {', '.join(sorted(kinds))} can't be rolled back: not supported")


def cache_shape(
    config: Any,
    num_slots: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    longest_pass: int | None = None,
) -> CacheShape:
    """The cache that a model of this configuration needs. Needs no weights.

    Raises ValueError when `capacity` exceeds the model's context.
    """
    check_supported(config, capacity)
    return CacheShape(
        config.num_hidden_layers,
        num_slots,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        capacity,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype,
        device,
        longest_pass,
    )


class HFAdapter:
    """One Hugging Face decoder as a function of (tokens, layout, store).

    Args:
        vocab_size: logits are cut to so many tokens, the first ones: a model's logits may be padded beyond what its
            tokenizer knows. None: they are left whole.

    Raises ValueError for a model that `check_supported` refuses, for one in training mode, and for a `vocab_size`
    beyond the model's own.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        check_supported(model.config, num_tokens=1)
        whole = model.config.vocab_size
        if vocab_size is not None and not 1 <= vocab_size <= whole:
            raise ValueError(f"vocab_size={vocab_size}: expected 1 to {whole}, the model's own")
        if model.training:
            raise ValueError(
                "the model is in training mode, in which dropout is random: call model.eval() first"
            )
        self.model = model
        self.vocab_size: int = vocab_size or whole

    @property
    def device(self) -> torch.device:
        return self.model.device

    def cache_shape(self, num_slots: int, capacity: int, longest_pass: int | None = None) -> CacheShape:
        """The cache this model needs. Raises what the function of that name does."""
        return cache_shape(
            self.model.config, num_slots, capacity, self.model.dtype, self.device, longest_pass
        )

    @torch.no_grad()  # not inference_mode: some quantized weights fail under it
    def forward(self, token_ids: Tensor, layout: PassLayout, store: KVStore, last_only: bool) -> Tensor:
        """Logits of one pass over `token_ids [B, T]`: `[B, T, V]`, or `[B, 1, V]` of the last column."""
        with _attention_implementation(self.model, ATTENTION_NAME):
            output = self.model(
                input_ids=token_ids,
                position_ids=layout.position_ids,
                cache=_StoreWriter(store, layout),
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                kv_store=store,
                pass_layout=layout,
            )
        # Here, before anything is made of them: a law that has once had more tokens is another law.
        return output.logits[..., : self.vocab_size]


@contextmanager
def _attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    # Restored after each pass, so that the caller's model still works with transformers' own generate.
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
