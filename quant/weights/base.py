"""What a weight format is: a way to store a model's weights. A new one is one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quant.kernels.base import QuantizedLinear
from quant.kernels.lookup import look_up_in
from quant.plan import LinearSite, Setting, Storage, WeightsPlan, plan_weights


@dataclass
class WeightsOptions(ABC):
    """Options of a weight format: plain typed fields with defaults, checked in `__post_init__`.

    `lossless` declares that the stored weights compute the same function as the float ones, `kernels` names what
    multiplies by them where there is no plan that does.
    """

    lossless: ClassVar[bool] = False
    kernels: ClassVar[str] = "torch"

    def plan(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> WeightsPlan | None:
        """What `convert` would do to a model of these shapes, which may be on the meta device; None: nothing to tell.

        Raises ValueError, in one line, where the format can't hold the model.
        """
        return None

    def resolved(self, plan: WeightsPlan) -> Self:
        """The same options with every `auto` replaced by what a plan chose."""
        return self

    @abstractmethod
    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        """Store the weights of a float model in this format, in place; returns the model.

        Raises ValueError, in one line, where the format can't hold the model.
        """


@dataclass
class QuantizedWeights(WeightsOptions):
    """A format that replaces linear layers, one by one.

    `head`: the layer behind the last, too; an embedding that shares its weight then looks up the quantized rows.
    `keep`: names of layers that stay as they are, as in `*.down_proj`.
    """

    head: bool = True
    keep: list[str] = field(default_factory=list)

    @abstractmethod
    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        """How a layer will be stored. Raises ValueError, in one line, where it can't be."""

    @abstractmethod
    def layer(self, linear: nn.Linear, site: LinearSite, setting: Setting) -> QuantizedLinear:
        """The layer over quantized weights, on the float layer's device. What `storage` refuses doesn't get here."""

    def choice(self, setting: Setting) -> str:
        """What the kernel was chosen by, for people; empty where there was no choice."""
        return ""

    def plan(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> WeightsPlan:
        return plan_weights(model, self, device, dtype)

    @torch.no_grad()
    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        device, dtype = _place(model)
        plan = self.plan(model, device, dtype)  # raises before anything is touched
        for row in plan.quantized:
            float_layer = model.get_submodule(row.site.name)
            new = self.layer(_as_linear(float_layer), row.site, plan.setting)
            parent, _, child = row.site.name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
            if row.site.embedding:
                embedding = model.get_submodule(row.site.embedding)
                assert isinstance(embedding, nn.Embedding)
                look_up_in(embedding, new)
        return model


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    return (torch.device("cpu"), torch.float32) if first is None else (first.device, first.dtype)


def _as_linear(layer: nn.Module) -> nn.Linear:
    """GPT-2's Conv1D is a linear layer with its weight the other way round."""
    if isinstance(layer, nn.Linear):
        return layer
    assert isinstance(layer, Conv1D)
    outputs, inputs = layer.weight.T.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear.train(layer.training)
