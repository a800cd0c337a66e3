"""What a weight format is: a way to store a model's weights. A new one is one file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class WeightsOptions(ABC):
    """Options of a weight format: plain typed fields with defaults, checked in `__post_init__`.

    `lossless` declares that the stored weights compute the same function as the float ones, `kernels` names the
    library whose kernels multiply by them.
    """

    lossless: ClassVar[bool] = False
    kernels: ClassVar[str] = "torch"

    @abstractmethod
    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        """Store the weights of a float model in this format, in place; returns the model.

        Raises ValueError, in one line, where the format can't hold the model.
        """


class QuantizedLinear(nn.Module):
    """A linear layer with weights of another kind; `in_features` and `out_features` are those of the float layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.train(linear.training)

    def with_bias(self, output: Tensor) -> Tensor:
        return output if self.bias is None else output + self.bias


def replace_linears(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]) -> int:
    """Put `make(name, linear)` in the place of each linear layer it returns a module for.

    Returns how many were replaced. Layers whose weight is shared with another module (a tied head) are left:
    quantizing one of the two would store the weight twice.
    """
    shared = _shared_weights(model)
    replaced = 0
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.data_ptr() in shared:
                continue
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            new = make(name, child)
            if new is not None:
                setattr(parent, child_name, new)
                replaced += 1
    return replaced


def _shared_weights(model: nn.Module) -> set[int]:
    counts = Counter(
        parameter.data_ptr() for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return {pointer for pointer, count in counts.items() if count > 1}
