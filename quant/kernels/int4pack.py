"""4-bit weights in groups with a scale and an offset, and torch's own CPU kernel (`_weight_int4pack_mm_for_cpu`).

Weight-only; activations are taken in bfloat16, others being tens of times slower. The kernel knows groups of 32, 64 or
128 inputs and packs 16 outputs at least; layers are padded to that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.base import QuantizedLinear, flat_rows, padded_to, padded_weight, shaped
from quant.kernels.packed_rows import PackedRows, codes_of
from quant.primitives import quantize_centred

BITS = 4
GROUPS = (32, 64, 128)
OUTPUTS_MULTIPLE = 16
ZERO_CODE = 8  # the kernel's codes stand for (code - 8) x scale + offset
# Rows that are packed by themselves, on every processor: a head that is looked up has a multiple of them.
BLOCK_ROWS = 64


class Int4PackLinear(QuantizedLinear):
    """Two codes a byte, and per group a scale and an offset in bfloat16.

    A head that is also the embedding (`keeps_rows`) stores in addition where the codes of a block of rows are, once.
    """

    kernel = "torch int4pack"
    row_invariant = True
    packed: Tensor
    scales_and_offsets: Tensor

    def __init__(
        self, linear: nn.Linear, group: int, *, symmetric: bool = False, keeps_rows: bool = False
    ) -> None:
        super().__init__(linear)
        self.group = group
        weight = padded_weight(linear, outputs_multiple(keeps_rows), group)
        self.padded_width = weight.shape[1]
        fits = weight.shape == linear.weight.shape
        self.is_simple = fits and self.bias is None and self.dtype is torch.bfloat16
        quantized = quantize_centred(weight, BITS, group, symmetric=symmetric, dtype=torch.bfloat16)
        codes = quantized.codes.to(torch.int32) + ZERO_CODE
        both = torch.stack([quantized.scales, quantized.offsets], -1).transpose(0, 1)  # [K / group, N, 2]
        self.register_buffer("packed", pack(codes))
        self.register_buffer("scales_and_offsets", both.contiguous())
        places = PackedRows(pack, BLOCK_ROWS, self.padded_width).places if keeps_rows else None
        self.register_buffer("places", places)
        if places is not None:
            check_rows(self.packed, places, codes)

    @staticmethod
    def stored_bytes(outputs: int, inputs: int, group: int, *, keeps_rows: bool) -> int:
        rows, width = padded_to(outputs, outputs_multiple(keeps_rows)), padded_to(inputs, group)
        places = 4 * BLOCK_ROWS * width if keeps_rows else 0
        return rows * width * BITS // 8 + rows * (width // group) * 2 * 2 + places

    def forward(self, inputs: Tensor) -> Tensor:
        buffers: Any = self._buffers  # a look-up in `self` takes longer
        if self.is_simple and inputs.is_contiguous() and inputs.dim() == 3 and len(inputs) == 1:
            # One text, which is hundreds of calls a pass: nothing but the product.
            return torch._weight_int4pack_mm_for_cpu(
                inputs.view(-1, self.in_features),
                buffers["packed"],
                self.group,
                buffers["scales_and_offsets"],
            ).unsqueeze(0)
        rows = flat_rows(inputs, self.in_features, self.padded_width)
        if rows.dtype is not torch.bfloat16:
            rows = rows.to(torch.bfloat16)
        output = torch._weight_int4pack_mm_for_cpu(
            rows, buffers["packed"], self.group, buffers["scales_and_offsets"]
        )
        if inputs.dtype is not torch.bfloat16:
            output = output.to(inputs.dtype)
        return shaped(output, inputs, self.out_features, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        places = self._buffers["places"]
        if places is None:
            raise ValueError("this layer was packed without its rows in mind")
        values = grouped_rows(self.packed, places, self.scales_and_offsets, self.group, ids)
        return values[..., : self.in_features].to(self.dtype)


def outputs_multiple(keeps_rows: bool) -> int:
    return BLOCK_ROWS if keeps_rows else OUTPUTS_MULTIPLE


def pack(codes: Tensor) -> Tensor:
    """Codes `[N, K]` 0 .. 15 (int32) as the kernel wants them."""
    return torch._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)


def check_rows(packed: Tensor, places: Tensor, codes: Tensor) -> None:
    """Raises ValueError where rows that are read back are not those that were packed: first, last, and between."""
    ids = torch.linspace(0, codes.shape[0] - 1, min(codes.shape[0], 2 * len(places) + 1)).long()
    if not torch.equal(codes_of(packed, places, ids).to(codes.dtype), codes[ids]):
        raise ValueError(
            "the head can't be looked up as it is packed on this processor; use weights.head=false"
        )


def grouped_rows(
    packed: Tensor, places: Tensor, scales_and_offsets: Tensor, group: int, ids: Tensor
) -> Tensor:
    """The weights `[*ids, K]` (float32) of some outputs, from what the kernel reads."""
    codes = codes_of(packed, places, ids).to(torch.float32) - ZERO_CODE
    scales, offsets = scales_and_offsets[:, ids].float().unbind(-1)  # [K / group, *ids]
    grouped = codes.unflatten(-1, (-1, group))
    values = grouped * scales.movedim(0, -1).unsqueeze(-1) + offsets.movedim(0, -1).unsqueeze(-1)
    return values.flatten(-2)
