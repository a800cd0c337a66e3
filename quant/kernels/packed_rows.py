"""Rows of a matrix of 4-bit codes, read out of the form in which some kernel packed it.

How a kernel packs is its own affair and differs between processors. So it is asked: matrices whose codes spell out
their own place are packed once, and show where each code went.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BITS = 4
LARGEST = 2**BITS - 1
Pack = Callable[[Tensor], Tensor]


class PackedRows:
    """Where the codes of a packed `[N, K]` matrix are, if so many rows at a time are packed by themselves.

    `places [rows, K]` counts half bytes from the start of a block, the low half of a byte first.
    """

    def __init__(self, pack: Pack, num_block_rows: int, width: int) -> None:
        """`pack`: from codes `[N, K]` (int32) to bytes."""
        self.num_block_rows = num_block_rows
        count = num_block_rows * width
        index = torch.arange(count)
        owner = torch.zeros(count, dtype=torch.int64)
        for digit in range(-(-count.bit_length() // BITS)):
            codes = (index >> (BITS * digit)) & LARGEST
            packed = pack(codes.to(torch.int32).view(num_block_rows, width)).flatten()
            halves = torch.stack([packed & LARGEST, packed >> BITS], -1).flatten()
            owner += halves.to(torch.int64) << (BITS * digit)
        places = torch.empty(count, dtype=torch.int32)
        places[owner] = index.to(torch.int32)
        self.places = places.view(num_block_rows, width)


def codes_of(packed: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """Codes `[*ids, K]` (uint8) of some rows."""
    num_block_rows, width = places.shape
    place = places[ids % num_block_rows]
    start = (ids // num_block_rows) * (num_block_rows * width // 2)
    found = packed.flatten()[start.unsqueeze(-1) + (place >> 1)]
    return (found >> (BITS * (place & 1))) & LARGEST
