"""8-bit weights with a scale per output channel, multiplied by torch's own CPU kernel (`_weight_int8pack_mm`).

With bfloat16 activations the kernel takes 16 inputs at a time without looking where a row ends, and a number that is no
multiple of 16 ends the process (torch 2.13): such layers are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quant.primitives import quantize_rows
from quant.weights.base import QuantizedLinear, WeightsOptions, replace_linears

INPUTS_MULTIPLE = 16


class Int8Linear(QuantizedLinear):
    """Weight-only: activations stay as they are."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        quantized = quantize_rows(linear.weight.detach())
        self.register_buffer("codes", quantized.codes.contiguous())
        self.register_buffer("scales", quantized.scales.squeeze(-1).to(linear.weight.dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features).contiguous()
        output = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)
        return self.with_bias(output.reshape(*inputs.shape[:-1], self.out_features))


@dataclass
class TorchInt8Weights(WeightsOptions):
    """Has no options. The head stays as it is where it is tied to the embedding."""

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        if model.device.type != "cpu":
            raise ValueError(f"the kernel runs on a CPU, the model is on {model.device.type}")
        if not replace_linears(model, _quantized):
            raise ValueError(f"a '{model.config.model_type}' model has no linear layer to quantize")
        return model


def _quantized(name: str, linear: nn.Linear) -> Int8Linear:
    if linear.in_features % INPUTS_MULTIPLE:
        raise ValueError(
            f"layer {name} is {linear.out_features} x {linear.in_features}, but the kernel needs a multiple of "
            f"{INPUTS_MULTIPLE} inputs; the format 'plain' holds any shape"
        )
    return Int8Linear(linear)
