"""LLM.int8 by bitsandbytes (Dettmers et al. 2022, arXiv 2208.07339): 8-bit weights and activations, outliers apart.

Stored: a byte a weight and a scale per output, all of it read by a pass; rows of a tied embedding are looked up in the
head's codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quant.kernels.base import QuantizedLinear
from quant.kernels.bnb_int8 import THRESHOLD, BnbInt8Linear
from quant.plan import LinearSite, Setting, Storage
from quant.weights.base import QuantizedWeights


@dataclass
class BnbInt8Weights(QuantizedWeights):
    """`threshold`: columns in which some activation is larger are multiplied in 16 bits; 0: none are."""

    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < float("inf"):
            raise ValueError(f"weights.threshold={self.threshold}: expected a number >= 0")

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        return BnbInt8Linear.storage(site, setting)

    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        return BnbInt8Linear(linear, self.threshold)
