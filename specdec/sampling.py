"""Logits to law, exactly once, for the target and the draft model alike."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.types import Law, SamplingParams


class Sampler:
    """Turns logits into laws under one set of sampling parameters."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def law(self, logits: Tensor) -> Law:
        """Laws `[...]` of `logits [..., V]`; the softmax is taken in float32 or wider.

        Greedy takes the first of equal largest logits, on every path: this is the only argmax over logits.
        """
        if self.params.temperature == 0:
            return Law(ids=logits.argmax(-1))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return Law(probs=torch.softmax(wide / self.params.temperature, -1))
