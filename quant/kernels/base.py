"""What every quantized linear layer here is, and how activations and results pass through one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """A linear layer with weights of another kind; `in_features` and `out_features` are those of the float layer.

    `kernel` names what multiplies. `row_invariant` says whether the result of a row is the same, bit for bit,
    whatever other rows are multiplied with it; None where nobody knows.
    """

    kernel: ClassVar[str]
    row_invariant: ClassVar[bool | None] = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias: Tensor | None = linear.bias
        self.dtype = linear.weight.dtype
        self.device = linear.weight.device
        self.train(linear.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuses another device or dtype: its kernel would read what is packed for this one as something else.

        Else nothing is to be done: scales have dtypes of their own, which a move of the model must not change.
        """
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (moved.device, moved.dtype) != (self.device, self.dtype):
            raise ValueError(
                f"weights packed for {self.kernel} can't move to {moved.device}, {moved.dtype}: move the model before "
                "its weights are converted"
            )
        return self

    def rows(self, ids: Tensor) -> Tensor:
        """The stored weights `[*ids, in_features]` of some outputs, as an embedding looks them up."""
        raise NotImplementedError(f"{self.kernel} has no rows to look up")

    @property
    def num_lookup_bytes(self) -> int:
        """Of the stored bytes those that only `rows` reads; where codes are, in a layer that stores that."""
        places = self._buffers.get("places")
        return 0 if places is None else places.nbytes

    @property
    def num_row_bytes(self) -> int:
        """Bytes that a row takes of `num_lookup_bytes`."""
        places = self._buffers.get("places")
        return 0 if places is None else places[0].nbytes


def padded_to(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


def padded_weight(linear: nn.Linear, outputs_multiple: int, inputs_multiple: int) -> Tensor:
    """The weight `[N, K]` with zeros up to multiples: they add nothing to any product."""
    weight = linear.weight.detach()
    outputs, inputs = weight.shape
    extra = (
        0,
        padded_to(inputs, inputs_multiple) - inputs,
        0,
        padded_to(outputs, outputs_multiple) - outputs,
    )
    return nn.functional.pad(weight, extra) if any(extra) else weight


def padding_note(shape: tuple[int, int], outputs_multiple: int, inputs_multiple: int) -> str:
    """What a plan says of padding; empty for a shape that fits."""
    found = tuple(map(padded_to, shape, (outputs_multiple, inputs_multiple)))
    return "" if found == shape else f"padded to {found[0]} x {found[1]}"


def narrowed_note(dtype: torch.dtype) -> str:
    """What a plan says of a kernel that takes bfloat16 activations only; empty where they are bfloat16."""
    return "" if dtype is torch.bfloat16 else "products in bfloat16"


def notes(*parts: str) -> str:
    """What a plan says of a layer, as far as there is something to say."""
    return "; ".join(part for part in parts if part)


def flat_rows(inputs: Tensor, width: int, padded_width: int) -> Tensor:
    """Activations `[M, padded_width]`, row after row in memory, as the kernels want them."""
    if padded_width == width and inputs.is_contiguous():  # most calls, and there are hundreds in a pass
        return inputs.view(-1, width)
    rows = inputs.reshape(-1, width)
    if padded_width != width:
        rows = nn.functional.pad(rows, (0, padded_width - width))
    return rows.contiguous()


def shaped(output: Tensor, inputs: Tensor, width: int, bias: Tensor | None) -> Tensor:
    """Results `[M, >= width]` in the shape of the activations, without the padding; and the bias added."""
    if output.shape[1] != width:
        output = output[:, :width]
    if bias is not None:
        output = output + bias
    if inputs.dim() == 3 and len(inputs) == 1:
        return output.unsqueeze(0)
    return output.view(*inputs.shape[:-1], width)
