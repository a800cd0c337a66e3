"""Keys in an arrangement of a store's own: which position each column holds, and which queries see it there.

A store may hold a token twice, dense and packed, or in slots that are not its position. Attention is over columns, so
all that a query must know is which of them are its.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.attention import AttentionRule, grouped_attention

if TYPE_CHECKING:
    from specdec.kv_cache import PassLayout


class Columns:
    """Tokens `tokens` of a pass against C columns of keys.

    Column c of row b holds position `positions[b, c]` and is seen by the queries at positions `since[b, c]` to
    `until[b, c] - 1`, as far as cause and window let them: all int64, `[B, C]` or broadcastable to it.
    """

    is_whole_prompt = False
    sees_everything = False

    def __init__(
        self, layout: PassLayout, tokens: slice, positions: Tensor, since: Tensor, until: Tensor
    ) -> None:
        self.extent = layout.extent
        self._capacity = layout.capacity
        self._own = layout.positions[:, tokens].unsqueeze(-1)
        self._positions = positions.unsqueeze(-2)
        self._since = since.unsqueeze(-2)
        self._until = until.unsqueeze(-2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of `query [B, H, T, D]` over `keys`, `values [B, KVH, C, D]`: `[B, T, H, D]`."""
        return grouped_attention(query, keys, values, self, rule)

    def additive_mask(self, dtype: torch.dtype, repeats: int, window: int | None = None) -> Tensor:
        """`[B, 1, repeats * T, C]`: 0 where a query may look, -inf where not. Made once per window."""
        key = (dtype, repeats, window)
        if key not in self._masks:
            hidden = self._hidden
            if window is not None:
                hidden = hidden | (self._positions <= self._own - window)
            hidden = hidden & (self._own < self._capacity)  # padding sees something, here everything
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[key] = mask.repeat(1, repeats, 1).unsqueeze(1)
        return self._masks[key]

    @cached_property
    def _hidden(self) -> Tensor:
        own = self._own
        return (self._positions > own) | (own < self._since) | (own >= self._until)

    @cached_property
    def _masks(self) -> dict[tuple[torch.dtype, int, int | None], Tensor]:
        return {}
