"""Two ways to have room for one more token: memory that was there before, and new memory that all is copied into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.articles.lab import Lab, limits
from experiments.articles.timing import Timing, repeated
from specdec.hf_adapter import HFAdapter


@dataclass(frozen=True)
class CacheGrowth:
    """One token's keys and values of all layers, appended to `context` of them, in the model's dtype.

    `writing` is into preallocated memory; `growing` concatenates, as transformers' DynamicCache does. `live_bytes` are
    those of `context` tokens, `most_bytes` what concatenating holds at most: all of it, and one tensor twice.
    """

    writing: Timing
    growing: Timing
    live_bytes: int
    most_bytes: int


def cache_growth(lab: Lab, context: int, **times: Any) -> CacheGrowth:
    """Append to tensors of the model's sizes, for one row; no model runs. Raises LimitError."""
    lab.check_fits(2, context)  # what is there, and what is made of it
    shape = HFAdapter(lab.model).cache_shape(1, context)

    def tensors(length: int) -> list[Tensor]:
        size = (1, shape.num_kv_heads, length, shape.head_dim)
        # Written, so that memory is there when it is timed: zeros may be promises.
        return [torch.ones(size, dtype=shape.dtype, device=shape.device) for _ in range(2 * shape.num_layers)]

    with limits():
        new, roomy, held = tensors(1), tensors(context + 1), tensors(context)
        grown = list(held)

        def write() -> None:
            for buffer, token in zip(roomy, new, strict=True):
                buffer[:, :, context : context + 1] = token

        def grow() -> None:
            for index, token in enumerate(new):
                grown[index] = torch.cat([grown[index], token], dim=-2)

        def forget() -> None:
            grown[:] = held

        live_bytes = sum(tensor.nbytes for tensor in held)
        return CacheGrowth(
            repeated(write, lab.device, **times),
            repeated(grow, lab.device, forget, **times),
            live_bytes,
            live_bytes + max(tensor.nbytes for tensor in held),
        )
