"""Attention over a ragged cache, and its registration through transformers' attention interface.

The function registered here does no arithmetic of its own: it hands the query to the pass's KV store, which
may attend to packed data. `grouped_attention` is the default that stores of plain tensors use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from specdec.kv_cache import KVStore, PassLayout

ATTENTION_NAME = "twospeed_ragged"
# Up to this many tokens per row the query heads of a group go through one matrix product together: on CPU the
# fused kernel costs three times as much for one query at context 300 (see docs/performance_log.md).
GROUPED_MAX_TOKENS = 32


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: PassLayout, scaling: float
) -> Tensor:
    """Causal attention of `query [B, H, T, D]` over `keys`, `values [B, KVH, extent, D]`: `[B, T, H, D]`.

    A query at position n sees the keys at positions 0..n of its own row, whatever stale data lies behind.
    """
    if query.shape[2] > GROUPED_MAX_TOKENS:
        return _fused(query, keys, values, layout, scaling)
    return _matrix_products(query, keys, values, layout, scaling)


def _fused(query: Tensor, keys: Tensor, values: Tensor, layout: PassLayout, scaling: float) -> Tensor:
    causal = layout.is_whole_prompt
    output = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if causal else layout.additive_mask(query.dtype),
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


def _matrix_products(
    query: Tensor, keys: Tensor, values: Tensor, layout: PassLayout, scaling: float
) -> Tensor:
    rows, heads, tokens, dim = query.shape
    kv_heads, extent = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    # Query heads of one group share their keys: fold them into the rows of one product.
    folded = (query * scaling).reshape(rows * kv_heads, group * tokens, dim)
    scores = torch.bmm(folded, keys.reshape(rows * kv_heads, extent, dim).transpose(1, 2))
    if not layout.sees_everything:
        mask = layout.additive_mask(query.dtype)  # [B, 1, T, extent]
        scores = (scores.view(rows, kv_heads * group, tokens, extent) + mask).view_as(scores)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(query.dtype)
    output = torch.bmm(weights, values.reshape(rows * kv_heads, extent, dim))
    return output.view(rows, heads, tokens, dim).transpose(1, 2)


def _store_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_store: KVStore,
    pass_layout: PassLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    # key and value are this pass's own; the cache has already written them to the store
    return kv_store.attend(module.layer_idx, query, pass_layout, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _store_attention)
