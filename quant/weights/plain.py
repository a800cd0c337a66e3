"""Weights in the run's dtype, as loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from quant.weights.base import WeightsOptions


@dataclass
class PlainWeights(WeightsOptions):
    """Has no options."""

    lossless: ClassVar[bool] = True

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        return model
