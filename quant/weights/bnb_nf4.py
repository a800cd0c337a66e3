"""4-bit NormalFloat weights by bitsandbytes (Dettmers et al. 2023, arXiv 2305.14314), weight-only.

Blocks of 64 weights share a float32 absmax. On CPU the kernel computes in bfloat16, needs a multiple of 32 outputs
and 64 inputs, and at the first forward repacks the weight and stores the absmax in 16 bits; after that the module
must not be moved.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from quant.weights.base import WeightsOptions, replace_linears

OUTPUTS_MULTIPLE = 32
INPUTS_MULTIPLE = 64


@dataclass
class BnbNf4Weights(WeightsOptions):
    """Has no options. The head stays as it is where it is tied to the embedding."""

    kernels: ClassVar[str] = "bitsandbytes"

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        if not replace_linears(model, _nf4_linear):
            raise ValueError(f"a '{model.config.model_type}' model has no linear layer to quantize")
        return model


def _bitsandbytes() -> Any:
    """The library, imported where it is used (it is slow), and kept from running code of a model hub.

    Where the processor has bf16 instructions its import asks the package `kernels`, if installed, for a compiled
    kernel from a hub, and warns if it can't have one. This format means the library's own kernel.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    before = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        return importlib.import_module("bitsandbytes")
    finally:
        if before is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before


def _nf4_linear(name: str, linear: nn.Linear) -> nn.Module:
    if linear.out_features % OUTPUTS_MULTIPLE or linear.in_features % INPUTS_MULTIPLE:
        raise ValueError(
            f"layer {name} is {linear.out_features} x {linear.in_features}, but the kernel needs "
            f"multiples of {OUTPUTS_MULTIPLE} x {INPUTS_MULTIPLE}; the format 'plain' holds any shape"
        )
    bnb = _bitsandbytes()
    compute_dtype = torch.bfloat16 if linear.weight.device.type == "cpu" else linear.weight.dtype
    new = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute_dtype,
        quant_type="nf4",
        device="meta",
    )
    new.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=new
    )
    new.bias = linear.bias
    return new.to(linear.weight.device).eval()  # the move is what quantizes
