"""Draft on while the draft model is confident: its most probable token has at least `min_prob`.

Source: Liu et al. 2024, "Kangaroo" (arXiv 2404.18911), section 3.3; transformers' assistant_confidence_threshold. The
threshold looks at the whole law, before a token is drawn, so the output's law stays the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.costs import PassCosts
from specdec.draft_length.base import DraftLength, DraftLengthOptions
from specdec.progress import Row
from specdec.types import Prospect


class ConfidenceDraftLength(DraftLength):
    """Drafters without logits (copies from the text) are not asked, and draft up to the limit."""

    def __init__(self, num_tokens: int, min_prob: float) -> None:
        self.num_tokens = num_tokens
        self.min_prob = min_prob

    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        return [self.num_tokens] * len(rows)

    def go_on(self, logits: Tensor, step: int) -> Sequence[bool]:
        # At temperature 1 whatever the run's is: greedy decoding has no doubts by itself.
        top = logits.float().amax(-1) - torch.logsumexp(logits.float(), -1)
        return (top.exp() >= self.min_prob).tolist()


@dataclass
class ConfidenceOptions(DraftLengthOptions):
    """At most `max` tokens, fewer where the draft model's largest probability is below `min_prob`."""

    max: int = 8
    min_prob: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_prob <= 1:
            raise ValueError(f"draft_length.min_prob={self.min_prob}: expected a number from 0 to 1")

    def build(self, costs: PassCosts | None = None) -> ConfidenceDraftLength:
        return ConfidenceDraftLength(self.max, self.min_prob)
