"""What passes cost, as a table that policies choose by. The engine has no clock: whoever builds a decoder measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PassCosts:
    """Times in one unit, of one row.

    `target[t - 1]` is a target pass over t tokens; `draft[k]` is making a proposal of k tokens, `draft[0]` trying and
    finding nothing. Beyond the tables the last step goes on.
    """

    target: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, times in (("target", self.target), ("draft", self.draft)):
            if not times or min(times) < 0:
                raise ValueError(f"{name}={times}: expected at least one time, none negative")

    def step(self, num_drafted: int) -> float:
        """A whole step that drafts so many tokens: proposal and verify pass."""
        return _at(self.draft, num_drafted) + _at(self.target, num_drafted)

    @property
    def plain(self) -> float:
        """A step without a drafter."""
        return self.target[0]


def _at(times: Sequence[float], index: int) -> float:
    if index < len(times):
        return times[index]
    growth = times[-1] - times[-2] if len(times) > 1 else 0.0
    return times[-1] + max(0.0, growth) * (index - len(times) + 1)
