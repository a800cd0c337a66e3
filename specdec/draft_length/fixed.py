"""Always draft K tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.draft_length.base import DraftLength, DraftLengthOptions
from specdec.progress import Row
from specdec.types import Law


class FixedDraftLength(DraftLength):
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        return [self.num_tokens] * len(rows)

    def go_on(self, draft_law: Law, step: int) -> Sequence[bool]:
        ids = draft_law.ids if draft_law.ids is not None else draft_law.probs
        assert ids is not None
        return [True] * ids.shape[0]


@dataclass
class FixedOptions(DraftLengthOptions):
    """`max` tokens in each step."""

    def build(self) -> FixedDraftLength:
        return FixedDraftLength(self.max)
