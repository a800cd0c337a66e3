"""Keys and values as they come, in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.attention import AttentionRule
from specdec.kv_cache import CacheShape, PassLayout


class DenseStore:
    """Keys and values as they come, preallocated: per layer `[S, KVH, capacity + 1, D]`, the last slot spare."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        size = (shape.num_layers, shape.num_slots, shape.num_kv_heads, shape.capacity + 1, shape.head_dim)
        # Zeros, not empty: a masked slot has weight 0, and 0 * nan would still be nan.
        self._keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def write(self, layer: int, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        for buffer, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if layout.is_aligned:
                start = layout.starts[0]
                buffer[layout.rows, :, start : start + layout.width] = new
            else:
                buffer[layout.row_index, :, layout.positions] = new.transpose(1, 2)

    def attend(self, layer: int, query: Tensor, layout: PassLayout, rule: AttentionRule) -> Tensor:
        keys = self._keys[layer][layout.rows, :, : layout.extent]
        values = self._values[layer][layout.rows, :, : layout.extent]
        return layout.attend(query, keys, values, rule)

    def commit(self, lengths: Sequence[int]) -> None:
        pass  # nothing is packed, so nothing becomes final

    def move(self, source: int, destination: int, length: int) -> None:
        for buffer in (self._keys, self._values):
            buffer[:, destination, :, :length] = buffer[:, source, :, :length]

    def release(self, slot: int) -> None:
        pass  # stale tokens are never seen

    def live_bytes(self, lengths: Sequence[int]) -> int:
        return self.bytes_per_token * sum(lengths)

    def allocated_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


@dataclass
class DenseOptions:
    """Has no options."""

    lossless: ClassVar[bool] = True

    def build(self, shape: CacheShape) -> DenseStore:
        return DenseStore(shape)
