"""An embedding that looks its rows up in a quantized head: one table for both, as where both are plain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant.kernels.base import QuantizedLinear


class RowLookup(nn.Embedding):
    """An embedding without a weight of its own; what remains of it (`weight`) is empty and tells the dtype."""

    head: QuantizedLinear

    def forward(self, input: Tensor) -> Tensor:
        return self.head.rows(input)


def look_up_in(embedding: nn.Embedding, head: QuantizedLinear) -> None:
    """Make an embedding look up rows of `head`, in place: a family's own kind keeps what it does to the rows."""
    kind = type(embedding)
    dtype, device = embedding.weight.dtype, embedding.weight.device
    embedding.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    embedding.head = head
    # After the family's own class, before torch's: its `super().forward` is the look-up.
    embedding.__class__ = (
        RowLookup if kind is nn.Embedding else type(f"Quantized{kind.__name__}", (kind, RowLookup), {})
    )
