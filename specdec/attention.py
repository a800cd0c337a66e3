"""Attention over a ragged cache, and its registration through transformers' attention interface.

The function registered here does no arithmetic of its own: it hands the query to the pass's KV store, which
may attend to packed data. `grouped_attention` is the default that stores of plain tensors use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from specdec.kv_cache import KVStore, PassLayout

ATTENTION_NAME = "twospeed_ragged"


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: PassLayout, scaling: float
) -> Tensor:
    """Causal attention of `query [B, H, T, D]` over `keys`, `values [B, KVH, extent, D]`: `[B, T, H, D]`.

    A query at position n sees the keys at positions 0..n of its own row, whatever stale data lies behind.
    """
    if layout.is_whole_prompt:
        # The causal kernel skips the half of the products that a mask would throw away.
        output = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2)
    rows, heads, tokens, dim = query.shape
    kv_heads = keys.shape[1]
    # The query heads of a group share their keys: folded into the token axis they read them once. On a CPU this
    # takes a fifth of the time of the same kernel with repeated heads, for one token at context 256.
    folded = query.reshape(rows, kv_heads, heads // kv_heads * tokens, dim)
    mask = None if layout.sees_everything else layout.additive_mask(query.dtype, heads // kv_heads)
    output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, tokens, dim).transpose(1, 2)


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
