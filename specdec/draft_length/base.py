"""How many tokens to draft. One file per policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.progress import Row
from specdec.types import Law


class DraftLength(Protocol):
    """Decides before drafting (`limits`) and while drafting (`go_on`), per row."""

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        """The most draft tokens for each row; a row carries its own counts of drafted and accepted tokens."""
        ...

    def go_on(self, draft_law: Law, step: int) -> Sequence[bool]:
        """Per row: draw draft token number `step` from this law `[B]`? Never sees a token it might drop."""
        ...


@dataclass
class DraftLengthOptions(ABC):
    """Options of a policy. `max` is K, the most draft tokens per step, for every policy."""

    max: int = 4

    def __post_init__(self) -> None:
        if self.max < 1:
            raise ValueError(f"draft_length.max={self.max}: expected at least 1")

    @abstractmethod
    def build(self) -> DraftLength: ...
