"""Weight formats for tests: each by a label, and the float weights that a converted layer stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toy_models import tiny_model
from transformers import PreTrainedModel

from quant.kernels import nf4
from quant.kernels.base import padded_weight
from quant.kernels.int4pack import BITS
from quant.primitives import quantize_centred, quantize_rows
from quant.weights.base import QuantizedWeights
from quant.weights.bnb_int8 import BnbInt8Weights
from quant.weights.bnb_nf4 import BnbNf4Weights
from quant.weights.int4 import Int4Weights
from quant.weights.int8 import Int8Weights
from quant.weights.quanto_int4 import QuantoInt4Weights
from quant.weights.quanto_int8 import QuantoInt8Weights


@dataclass(frozen=True)
class Known:
    """A format with what is true of it: bits of a code, and the kernel of a bf16 model on a CPU."""

    weights: QuantizedWeights
    bits: int
    kernel: str


FORMATS = {
    "int8": Known(Int8Weights(kernel="torch_int8pack"), 8, "torch int8pack"),
    "int8_onednn": Known(Int8Weights(kernel="onednn_u8s8"), 8, "oneDNN u8s8"),
    "int4": Known(Int4Weights(kernel="torch_int4pack"), 4, "torch int4pack"),
    "int4_64": Known(Int4Weights(kernel="torch_int4pack", group=64), 4, "torch int4pack"),
    "int4_symmetric": Known(
        Int4Weights(kernel="torch_int4pack", group=128, symmetric=True), 4, "torch int4pack"
    ),
    "bnb_nf4": Known(BnbNf4Weights(), 4, "bitsandbytes nf4"),
    "bnb_int8": Known(BnbInt8Weights(), 8, "bitsandbytes LLM.int8"),
    "quanto_int8": Known(QuantoInt8Weights(), 8, "quanto: torch int8pack"),
    "quanto_int4": Known(QuantoInt4Weights(), 4, "quanto: torch int4pack"),
}


def oracle(label: str, linear: nn.Linear) -> Tensor:
    """The weights `[N, K]` in float64 that a float layer's weight is rounded to, not by the kernel's own packing."""
    weights: Any = FORMATS[label].weights
    if label.startswith("int8"):
        dtype = linear.weight.dtype if label == "int8" else torch.float32
        return quantize_rows(linear.weight.detach(), dtype).dequantized().double()
    if label.startswith("int4"):
        group = weights.group or 32
        quantized = quantize_centred(
            padded_weight(linear, 1, group), BITS, group, symmetric=weights.symmetric, dtype=torch.bfloat16
        )
        wide = type(quantized)(quantized.codes, quantized.scales.double(), quantized.offsets.double())
        return wide.dequantized()[:, : linear.in_features]
    if label == "bnb_nf4":
        return nf4.oracle(linear).double()
    if label == "bnb_int8":
        half = linear.weight.detach().to(torch.float16).double()  # what the library rounds
        largest = half.abs().amax(1, keepdim=True)
        return (half * (127 / largest)).round() * (largest / 127)
    return _quanto(label, linear)


def _quanto(label: str, linear: nn.Linear) -> Tensor:
    """By the library's own dequantization, where it needs no extension; else from what the kernel is given."""
    from quant.kernels.quanto import QuantoLinear

    layer = QuantoLinear(linear, FORMATS[label].bits, keeps_rows=True)
    found: Any = layer.weight
    if label == "quanto_int8":
        values = found._data.double() * found._scale.double()
    else:
        codes = found._data.unpack().double() - 8  # by products with one-hot rows
        scales, offsets = found._scale_shift.double().transpose(0, 1).unbind(-1)
        grouped = codes.unflatten(1, (-1, 128))
        values = (grouped * scales.unsqueeze(-1) + offsets.unsqueeze(-1)).flatten(1)
    return values[: linear.out_features, : linear.in_features]


def converted_layer(label: str, linear: nn.Linear, *, weights: QuantizedWeights | None = None) -> nn.Module:
    model: Any = nn.Sequential(linear)
    (weights or FORMATS[label].weights).convert(model)
    return model[0]


def linear_of(
    outputs: int, inputs: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).eval().requires_grad_(False)


def bf16_model(family: str = "llama", *, tied: bool = True, **sizes: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": tied} | sizes
    return tiny_model(family, dtype=torch.bfloat16, **sizes)
