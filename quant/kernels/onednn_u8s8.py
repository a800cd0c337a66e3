"""8-bit weights and 8-bit activations through oneDNN (`onednn.qlinear_pointwise`), activations scaled token by token.

The operator belongs to torch's exported-quantization path, not to its documented interface, so it is probed before it
is used. Unsigned activations with a zero at 128 are the fast path; signed ones fall to a reference. oneDNN packs the
weight for the processor, in a form that can't be looked into: a head that is also the embedding keeps its codes a
second time, of which a pass reads one row per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.base import QuantizedLinear, flat_rows, shaped
from quant.primitives import quantize_rows

ZERO_POINT = 128
# Truncation of a value moved up by half rounds it to the nearest.
HALF_UP = ZERO_POINT + 0.5


class OneDnnLinear(QuantizedLinear):
    """Each token's activations are rounded to 8 bits of its largest one."""

    kernel = "oneDNN u8s8"
    row_invariant = True
    packed: Tensor
    scales: Tensor
    zero_points: Tensor

    def __init__(self, linear: nn.Linear, *, keeps_rows: bool = False) -> None:
        super().__init__(linear)
        quantized = quantize_rows(linear.weight.detach())
        self.register_buffer("packed", torch.ops.onednn.qlinear_prepack(quantized.codes.contiguous(), None))
        self.register_buffer("scales", quantized.scales.squeeze(-1).contiguous())
        self.register_buffer("zero_points", torch.zeros(self.out_features, dtype=torch.int32))
        self.register_buffer("codes", quantized.codes if keeps_rows else None)

    @staticmethod
    def stored_bytes(outputs: int, inputs: int, *, keeps_rows: bool) -> int:
        empty = torch.zeros(outputs, inputs, dtype=torch.int8)
        packed = torch.ops.mkldnn._nbytes(torch.ops.onednn.qlinear_prepack(empty, None))
        return packed + 2 * 4 * outputs + (outputs * inputs if keeps_rows else 0)

    def forward(self, inputs: Tensor) -> Tensor:
        buffers: Any = self._buffers
        rows = flat_rows(inputs, self.in_features, self.in_features)
        codes, steps = rounded_tokens(rows)
        output = torch.ops.onednn.qlinear_pointwise.default(
            codes,
            1.0,
            ZERO_POINT,
            buffers["packed"],
            buffers["scales"],
            buffers["zero_points"],
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        output = output.mul_(steps).to(inputs.dtype)
        return shaped(output, inputs, self.out_features, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        codes = self._buffers["codes"]
        if codes is None:
            raise ValueError(f"{self.kernel} can't be looked into, and this layer kept no rows")
        return (codes[ids].to(self.scales.dtype) * self.scales[ids].unsqueeze(-1)).to(self.dtype)

    @property
    def num_lookup_bytes(self) -> int:
        codes = self._buffers["codes"]
        return 0 if codes is None else codes.nbytes

    @property
    def num_row_bytes(self) -> int:
        return 0 if self._buffers["codes"] is None else self.in_features

    def __deepcopy__(self, memo: dict[int, Any]) -> OneDnnLinear:
        raise ValueError(f"weights packed for {self.kernel} can't be copied: convert another float model")


def rounded_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[M, K]` around 128 and the step `[M, 1]` of each token: (code - 128) x step is the activation.

    A token of zeros has a step of the smallest number, not 0.
    """
    largest = torch.linalg.vector_norm(rows, float("inf"), -1, True, dtype=torch.float32)
    steps = largest.mul_(1 / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return torch.add(rows / steps, HALF_UP).to(torch.uint8), steps
