"""How many tokens to draft. One file per policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.costs import PassCosts
from specdec.progress import Row
from specdec.types import Prospect


class DraftLength(ABC):
    """Decides before drafting (`limits`) and while drafting (`go_on`), per row; learns from what was accepted."""

    @abstractmethod
    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        """The most draft tokens for each row, given what drafting would take; 0 is plain decoding."""

    def go_on(self, logits: Tensor, step: int) -> Sequence[bool]:
        """Per row: draw draft token number `step` from the draft model's `logits [B, V]`?

        Never sees a token that it might drop: dropping one for what it is would change the output's law.
        """
        return [True] * logits.shape[0]

    def accept(self, rows: Sequence[Row], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What came of the step, before it is committed."""


@dataclass
class DraftLengthOptions(ABC):
    """Options of a policy. `max` is K, the most draft tokens per step, for every policy.

    Where `needs_costs` is true, `build` gets the measured times of passes, else None.
    """

    max: int = 4

    def __post_init__(self) -> None:
        if self.max < 1:
            raise ValueError(f"draft_length.max={self.max}: expected at least 1")

    @property
    def needs_costs(self) -> bool:
        return False

    @abstractmethod
    def build(self, costs: PassCosts | None = None) -> DraftLength: ...
