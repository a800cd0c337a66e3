"""4-bit weights in groups with a scale and an offset, and torch's own CPU kernel (`_weight_int4pack_mm_for_cpu`).

The kernel wants bfloat16 activations (others are tens of times slower), groups of 32, 64 or 128 inputs, and a multiple
of 16 outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quant.primitives import quantize_affine
from quant.weights.base import QuantizedLinear, WeightsOptions, replace_linears

GROUPS = (32, 64, 128)
OUTPUTS_MULTIPLE = 16
ZERO_CODE = 8  # the kernel's codes stand for (code - 8) x scale + offset


class Int4Linear(QuantizedLinear):
    """Weight-only: activations are taken in bfloat16."""

    packed: Tensor
    scales_and_offsets: Tensor

    def __init__(self, linear: nn.Linear, group: int) -> None:
        super().__init__(linear)
        self.group = group
        quantized = quantize_affine(linear.weight.detach(), 4, group)
        codes = quantized.codes.to(torch.int32).contiguous()
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        offsets = quantized.offsets + ZERO_CODE * quantized.scales
        both = torch.stack([quantized.scales, offsets], -1).transpose(0, 1)  # [K / group, N, 2]
        self.register_buffer("scales_and_offsets", both.to(torch.bfloat16).contiguous())

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        output = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, self.group, self.scales_and_offsets
        )
        return self.with_bias(output.to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features))


@dataclass
class TorchInt4Weights(WeightsOptions):
    """`group`: inputs that share a scale and an offset. The head stays as it is where it is tied to the embedding."""

    group: int = 32

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"weights.group={self.group}: expected one of {', '.join(map(str, GROUPS))}")

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        if model.device.type != "cpu":
            raise ValueError(f"the kernel runs on a CPU, the model is on {model.device.type}")
        if not replace_linears(model, self._quantized):
            raise ValueError(f"a '{model.config.model_type}' model has no linear layer to quantize")
        return model

    def _quantized(self, name: str, linear: nn.Linear) -> Int4Linear:
        if linear.out_features % OUTPUTS_MULTIPLE or linear.in_features % self.group:
            raise ValueError(
                f"layer {name} is {linear.out_features} x {linear.in_features}, but the kernel needs "
                f"multiples of {OUTPUTS_MULTIPLE} x {self.group}; the format 'plain' holds any shape"
            )
        return Int4Linear(linear, self.group)
