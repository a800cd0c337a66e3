"""Always draft K tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.costs import PassCosts
from specdec.draft_length.base import DraftLength, DraftLengthOptions
from specdec.progress import Row
from specdec.types import Prospect


class FixedDraftLength(DraftLength):
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        return [self.num_tokens] * len(rows)


@dataclass
class FixedOptions(DraftLengthOptions):
    """`max` tokens in each step."""

    def build(self, costs: PassCosts | None = None) -> FixedDraftLength:
        return FixedDraftLength(self.max)
