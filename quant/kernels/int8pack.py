"""8-bit weights with a scale per output, multiplied by torch's own CPU kernel (`_weight_int8pack_mm`).

Weight-only: activations stay as they are. With bfloat16 the kernel takes 16 inputs at a time without looking where a
row ends, and a number that is no multiple of 16 ends the process (torch 2.13): inputs are padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.base import QuantizedLinear, flat_rows, padded_to, padded_weight, shaped
from quant.primitives import quantize_rows

INPUTS_MULTIPLE = 16


class Int8PackLinear(QuantizedLinear):
    """Codes row by row, so that an embedding can look up rows of a head: nothing is stored twice."""

    kernel = "torch int8pack"
    row_invariant = True
    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        quantized = quantize_rows(padded_weight(linear, 1, INPUTS_MULTIPLE), linear.weight.dtype)
        self.padded_width = quantized.codes.shape[1]
        self.is_simple = self.bias is None and self.padded_width == self.in_features
        self.register_buffer("codes", quantized.codes.contiguous())
        self.register_buffer("scales", quantized.scales.squeeze(-1).contiguous())

    @staticmethod
    def stored_bytes(outputs: int, inputs: int, dtype: torch.dtype) -> int:
        return outputs * (padded_to(inputs, INPUTS_MULTIPLE) + dtype.itemsize)

    def forward(self, inputs: Tensor) -> Tensor:
        buffers: Any = self._buffers  # a look-up in `self` takes longer
        if self.is_simple and inputs.is_contiguous() and inputs.dim() == 3 and len(inputs) == 1:
            # One text, which is hundreds of calls a pass: nothing but the product.
            return torch._weight_int8pack_mm(
                inputs.view(-1, self.in_features), buffers["codes"], buffers["scales"]
            ).unsqueeze(0)
        rows = flat_rows(inputs, self.in_features, self.padded_width)
        output = torch._weight_int8pack_mm(rows, buffers["codes"], buffers["scales"])
        return shaped(output, inputs, self.out_features, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes[ids, : self.in_features].to(self.scales.dtype) * self.scales[ids].unsqueeze(-1)
