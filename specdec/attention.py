"""Attention over a ragged cache, and its registration through transformers' attention interface.

The function registered here does no arithmetic of its own: it hands the query to the pass's KV store, which
may attend to packed data. `grouped_attention` is the default that stores of plain tensors use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from specdec.columns import Columns
    from specdec.kv_cache import KVStore, PassLayout

ATTENTION_NAME = "twospeed_ragged"
# What models say beside these changes what attention is, and is refused by name rather than left out.
IGNORED = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "head_mask"}
)


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends: scores are `query x key x scaling`.

    With a `window` a query sees that many positions, its own included; with a `softcap` c scores become
    c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: PassLayout | Columns, rule: AttentionRule
) -> Tensor:
    """Causal attention of `query [B, H, T, D]` over `keys`, `values [B, KVH, extent, D]`: `[B, T, H, D]`.

    A query at position n sees the keys at positions 0..n of its own row, whatever stale data lies behind. Where the
    layout is `Columns`, the keys are those, instead of positions 0..extent - 1.
    """
    window = rule.window if rule.window is not None and rule.window < layout.extent else None
    if layout.is_whole_prompt and window is None and rule.softcap is None:
        # The causal kernel skips the half of the products that a mask would throw away.
        output = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=rule.scaling, enable_gqa=True
        )
        return output.transpose(1, 2)
    rows, heads, tokens, dim = query.shape
    kv_heads = keys.shape[1]
    # The query heads of a group share their keys: folded into the token axis they read them once. On a CPU this
    # takes a fifth of the time of the same kernel with repeated heads, for one token at context 256.
    folded = query.reshape(rows, kv_heads, heads // kv_heads * tokens, dim)
    sees_everything = layout.sees_everything and window is None
    mask = None if sees_everything else layout.additive_mask(query.dtype, heads // kv_heads, window)
    if rule.softcap is None:
        output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=rule.scaling)
    else:
        output = _capped_attention(folded, keys, values, mask, rule.scaling, rule.softcap)
    return output.reshape(rows, heads, tokens, dim).transpose(1, 2)


def _capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(values.dtype) @ values


def _store_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_store: KVStore,
    pass_layout: PassLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    unknown = sorted(name for name, value in others.items() if value is not None and name not in IGNORED)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(unknown)}, which attention here does not know"
        )
    rule = AttentionRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    # key and value are this pass's own; the cache has already written them to the store
    return kv_store.attend(module.layer_idx, query, pass_layout, rule), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _store_attention)
