"""Each token quantized on its own when it is written: a scale per row, head and token, or several inside a head.

What a token is stored as depends on nothing but that token, so rolling back, moving and reading in chunks are what they
are in a dense store. 8 bits are symmetric, 4 and 2 have a minimum as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quant.kv.base import KVOptions, Layout, PackedBuffer, Shape


class PerTokenStore:
    """Per layer codes and scales of `[S, KVH, capacity + 1, D / group, group]` numbers, the last slot spare."""

    def __init__(self, shape: Shape, key_bits: int, value_bits: int, group: int) -> None:
        self.shape: Any = shape
        lead = (shape.num_layers, shape.num_slots, shape.num_kv_heads, shape.capacity + 1)
        self._unit = (shape.head_dim // group, group)
        self._keys, self._values = (
            PackedBuffer(lead, self._unit, -1, bits, shape.dtype, shape.device)
            for bits in (key_bits, value_bits)
        )

    def write(self, layer: int, layout: Layout, keys: Tensor, values: Tensor) -> None:
        index: tuple[Any, ...] = (layer, layout.row_index, slice(None), layout.positions)
        if layout.is_aligned:
            start = layout.starts[0]
            index = (layer, layout.rows, slice(None), slice(start, start + layout.width))
        for buffer, new in ((self._keys, keys), (self._values, values)):
            grouped = new.unflatten(-1, self._unit)
            buffer.write(index, grouped if layout.is_aligned else grouped.transpose(1, 2))

    def attend(self, layer: int, query: Tensor, layout: Layout, rule: Any) -> Tensor:
        seen = (layer, layout.rows, slice(None), slice(layout.extent))
        keys, values = (buffer.read(seen).flatten(-2) for buffer in (self._keys, self._values))
        return layout.attend(query, keys, values, rule)

    def commit(self, lengths: Sequence[int]) -> None:
        pass  # a token is packed when it is written

    def move(self, source: int, destination: int, length: int) -> None:
        for buffer in (self._keys, self._values):
            buffer.copy(
                (slice(None), source, slice(None), slice(length)),
                (slice(None), destination, slice(None), slice(length)),
            )

    def release(self, slot: int) -> None:
        pass  # stale tokens are never seen

    def live_bytes(self, lengths: Sequence[int]) -> int:
        return self.bytes_per_token * sum(lengths)

    def allocated_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def bytes_per_token(self) -> int:
        heads = self.shape.num_layers * self.shape.num_kv_heads
        return heads * (self._keys.unit_bytes + self._values.unit_bytes)


@dataclass
class PerTokenOptions(KVOptions):
    """`key_bits`, `value_bits`: 2, 4 or 8. `group`: numbers of a head that share a scale; 0: all of them."""

    def check(self, shape: Shape) -> None:
        self._group(shape)

    def build(self, shape: Shape) -> PerTokenStore:
        return PerTokenStore(shape, self.key_bits, self.value_bits, self._group(shape))

    def _group(self, shape: Shape) -> int:
        return self.group_of(shape.head_dim, self.key_bits, self.value_bits)
