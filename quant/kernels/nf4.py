"""bitsandbytes' 4-bit CPU kernel (NormalFloat codes, Dettmers et al. 2023, arXiv 2305.14314), called directly.

Weight-only; activations are taken in bfloat16, which is what the kernel computes in. Blocks of 64 inputs share an
absmax, in 16 bits. The library packs a weight for this kernel at its first product; here it is packed at once. Its own
module around the kernel takes half as long again as the kernel at the sizes of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant._bitsandbytes import bitsandbytes
from quant.kernels.base import QuantizedLinear, flat_rows, padded_to, padded_weight, shaped
from quant.kernels.int4pack import check_rows
from quant.kernels.packed_rows import PackedRows, codes_of

BLOCK = 64
# The kernel's: also how many rows are packed by themselves.
OUTPUTS_MULTIPLE = 32


class Nf4Linear(QuantizedLinear):
    """Two codes a byte, an absmax in bfloat16 per block, and the 16 values that codes stand for."""

    kernel = "bitsandbytes nf4"
    row_invariant = True
    packed: Tensor
    absmax: Tensor
    values: Tensor

    def __init__(self, linear: nn.Linear, *, keeps_rows: bool = False) -> None:
        super().__init__(linear)
        weight = padded_weight(linear, OUTPUTS_MULTIPLE, BLOCK)
        self.padded_shape = list(weight.shape)
        functional = bitsandbytes().functional
        packed, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        codes = codes_in_order(packed, weight.shape)
        self.register_buffer("packed", pack(codes))
        absmax = state.absmax.view(weight.shape[0], -1).T  # [K / 64, N]
        self.register_buffer("absmax", absmax.to(torch.bfloat16).contiguous())
        self.register_buffer("values", state.code.float())
        places = PackedRows(pack, OUTPUTS_MULTIPLE, weight.shape[1]).places if keeps_rows else None
        self.register_buffer("places", places)
        if places is not None:
            check_rows(self.packed, places, codes)

    @staticmethod
    def stored_bytes(outputs: int, inputs: int, *, keeps_rows: bool) -> int:
        rows, width = padded_to(outputs, OUTPUTS_MULTIPLE), padded_to(inputs, BLOCK)
        places = 4 * OUTPUTS_MULTIPLE * width if keeps_rows else 0
        return rows * width // 2 + 2 * rows * (width // BLOCK) + 4 * 16 + places

    def forward(self, inputs: Tensor) -> Tensor:
        buffers: Any = self._buffers
        rows = flat_rows(inputs, self.in_features, self.padded_shape[1])
        if rows.dtype is not torch.bfloat16:
            rows = rows.to(torch.bfloat16)
        output = torch.ops.bitsandbytes.gemv_4bit.default(
            rows, buffers["packed"], self.padded_shape, buffers["absmax"], buffers["values"], BLOCK
        )
        if inputs.dtype is not torch.bfloat16:
            output = output.to(inputs.dtype)
        return shaped(output, inputs, self.out_features, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        places = self._buffers["places"]
        if places is None:
            raise ValueError("this layer was packed without its rows in mind")
        values = self.values[codes_of(self.packed, places, ids).long()].unflatten(-1, (-1, BLOCK))
        absmax = self.absmax.float()[:, ids].movedim(0, -1).unsqueeze(-1)
        return (values * absmax).flatten(-2)[..., : self.in_features].to(self.dtype)


def is_native() -> bool:
    """Has the processor the bf16 instructions without which the library unpacks all weights at every product?"""
    return bool(bitsandbytes().functional.has_avx512bf16())


def codes_in_order(packed: Tensor, shape: torch.Size) -> Tensor:
    """Codes `[N, K]` (int32) as the library quantizes them: the high half of a byte first."""
    halves = packed.flatten().view(torch.uint8)
    return torch.stack([halves >> 4, halves & 15], -1).view(shape).to(torch.int32)


def pack(codes: Tensor) -> Tensor:
    """Codes `[N, K]` as the kernel wants them: of 32 rows side by side, 16 low halves and 16 high ones at a time."""
    rows, width = codes.shape
    sides = codes.view(rows // OUTPUTS_MULTIPLE, OUTPUTS_MULTIPLE, width // 2, 2).transpose(1, 2)
    low, high = sides.reshape(-1, 2 * OUTPUTS_MULTIPLE).split(OUTPUTS_MULTIPLE, dim=1)
    return ((high << 4) | low).to(torch.uint8).view(rows, width // 2)


def oracle(linear: nn.Linear) -> Tensor:
    """The weights `[N, K]` that codes of a float layer's weight stand for, by the library's own dequantization."""
    weight = padded_weight(linear, 1, BLOCK).contiguous()
    functional = bitsandbytes().functional
    packed, state = functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
    )
    values: Tensor = functional.dequantize_4bit(packed, state)
    return values[:, : linear.in_features]
