"""What KV stores here are told, and what they share. A new one is one file in this folder.

The engine's own types are not imported: a store works with whatever has these attributes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from quant.primitives import Packed, pack_groups, unpack_groups

BITS = (2, 4, 8)


class Shape(Protocol):
    """Sizes of a cache: `capacity` positions per row, of which a pass appends `longest_pass` at most, if known."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def longest_pass(self) -> int | None: ...


class Columns(Protocol):
    """Which queries see which columns of keys."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Any) -> Tensor: ...


class Layout(Protocol):
    """One pass: row b, slot `rows.start + b`, appends `counts[b]` of `width` tokens at positions `starts[b]...`.

    `positions [B, width]` has `capacity` for padding. Attention is the engine's: `attend` over positions
    0..extent - 1, or over columns in another arrangement.
    """

    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def counts(self) -> tuple[int, ...]: ...
    @property
    def width(self) -> int: ...
    @property
    def is_fixed(self) -> bool: ...
    @property
    def is_aligned(self) -> bool: ...
    @property
    def rows(self) -> slice: ...
    @property
    def extent(self) -> int: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def row_index(self) -> Tensor: ...
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Any) -> Tensor: ...
    def columns(self, positions: Tensor, since: Tensor, until: Tensor, tokens: slice) -> Columns: ...


@dataclass
class KVOptions(ABC):
    """Options of a KV store: plain typed fields with defaults, checked in `__post_init__`.

    `key_bits`, `value_bits`: 2, 4 or 8. `group`: numbers of a head that share a scale where they are quantized per
    token; 0: all of them.
    """

    lossless: ClassVar[bool] = False

    key_bits: int = 8
    value_bits: int = 8
    group: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in BITS:
                raise ValueError(f"kv.{name}={bits}: expected one of {', '.join(map(str, BITS))}")
        if self.group < 0:
            raise ValueError(f"kv.group={self.group}: expected at least 1, or 0 for a whole head")

    @abstractmethod
    def check(self, shape: Any) -> None:
        """Raises ValueError, in one line, where the options don't fit a cache of this shape.

        Whoever knows the shape asks before anything is loaded; `build` asks again.
        """

    @abstractmethod
    def build(self, shape: Any) -> Any:
        """The store. Raises what `check` does."""

    def group_of(self, head_dim: int, *all_bits: int) -> int:
        """The size of a group in a head of `head_dim` numbers.

        Raises ValueError for one that does not divide the head, or does not fill whole bytes with codes of any of the
        given bits, naming the nearest that do.
        """
        group = self.group or head_dim
        fits = [
            size
            for size in range(1, head_dim + 1)
            if head_dim % size == 0 and all(size * bits % 8 == 0 for bits in all_bits)
        ]
        if group in fits:
            return group
        if not fits:
            raise ValueError(
                f"heads of {head_dim} numbers don't fill whole bytes with codes of {min(all_bits)} bits; "
                f"choose more bits (kv.key_bits, kv.value_bits) or kv=dense"
            )
        below, above = [s for s in fits if s < group][-1:], [s for s in fits if s > group][:1]
        raise ValueError(
            f"kv.group={self.group}: groups have to divide a head of {head_dim} numbers and fill whole bytes with "
            f"codes of {min(all_bits)} bits; nearest: {' or '.join(map(str, below + above))}"
        )


class PackedBuffer:
    """Quantized units of one shape in a preallocated array of them; groups lie along one dimension of a unit."""

    def __init__(
        self, lead: Sequence[int], unit: Sequence[int], dim: int, bits: int, dtype: torch.dtype, device: Any
    ) -> None:
        # Scales have 16 bits, and the range of the model's own numbers.
        self._stored = torch.float16 if dtype == torch.float16 else torch.bfloat16
        self._bits, self._dim, self._dtype = bits, dim, dtype
        reduced = list(unit)
        reduced[dim] = 1

        def zeros(size: Sequence[int], kind: torch.dtype) -> Tensor:
            # Not empty: what was never written is masked, has weight 0, and 0 * nan would still be nan.
            return torch.zeros((*lead, *size), dtype=kind, device=device)

        codes = zeros((*unit[:-1], unit[-1] * bits // 8), torch.int8 if bits == 8 else torch.uint8)
        scales = zeros(reduced, self._stored)
        self._packed = Packed(codes, scales, None if bits == 8 else zeros(reduced, self._stored))
        self.unit_bytes = prod(codes.shape[len(lead) :]) + prod(reduced) * 2 * (1 if bits == 8 else 2)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def write(self, index: Any, values: Tensor) -> None:
        """Quantize `values` into the units that `index` selects."""
        packed = pack_groups(values, self._bits, self._dim, self._stored)
        self._packed.codes[index] = packed.codes
        self._packed.scales[index] = packed.scales
        if self._packed.lows is not None:
            self._packed.lows[index] = packed.lows  # type: ignore[assignment]

    def read(self, index: Any, out: Tensor | None = None) -> Tensor:
        """The units that `index` selects, dequantized."""
        lows = None if self._packed.lows is None else self._packed.lows[index]
        packed = Packed(self._packed.codes[index], self._packed.scales[index], lows)
        return unpack_groups(packed, self._bits, self._dtype, out)

    def as_read(self, values: Tensor) -> Tensor:
        """What `read` would give after `write`; stores nothing."""
        packed = pack_groups(values, self._bits, self._dim, self._stored)
        return unpack_groups(packed, self._bits, self._dtype)

    def copy(self, source: Any, destination: Any) -> None:
        """Units to other places, as they are."""
        for tensor in self._tensors:
            tensor[destination] = tensor[source]

    @property
    def _tensors(self) -> list[Tensor]:
        found = (self._packed.codes, self._packed.scales, self._packed.lows)
        return [tensor for tensor in found if tensor is not None]
