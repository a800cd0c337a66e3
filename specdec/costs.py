"""What passes cost, as tables that policies choose by. The engine has no clock: whoever builds a decoder measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.types import Prospect


@dataclass(frozen=True)
class PassCosts:
    """Times in one unit, of one row.

    `target[t - 1]` is a target pass over t tokens; `draft[kind][k]` is making a proposal of k tokens of that kind,
    `draft[kind][0]` trying and finding nothing. Beyond the tables the last step goes on; a kind that was not measured
    costs what the dearest does. `unread_token` is what each token costs that the drafter has to read first.
    """

    target: tuple[float, ...]
    draft: Mapping[str, tuple[float, ...]]
    unread_token: float = 0.0

    def __post_init__(self) -> None:
        tables = {"target": self.target, **{f"draft[{kind!r}]": times for kind, times in self.draft.items()}}
        for name, times in tables.items():
            if not times or min(times) < 0:
                raise ValueError(f"{name}={times}: expected at least one time, none negative")
        if not self.draft:
            raise ValueError("draft={}: expected the times of at least one kind of proposal")
        if self.unread_token < 0:
            raise ValueError(f"unread_token={self.unread_token}: expected a time, not a negative one")

    def step(self, num_drafted: int, kind: str = Prospect.kind) -> float:
        """A whole step that drafts so many tokens: proposal and verify pass."""
        tables = [self.draft[kind]] if kind in self.draft else self.draft.values()
        return max(_at(times, num_drafted) for times in tables) + _at(self.target, num_drafted)

    @property
    def plain(self) -> float:
        """A step without a drafter."""
        return self.target[0]


def _at(times: Sequence[float], index: int) -> float:
    if index < len(times):
        return times[index]
    growth = times[-1] - times[-2] if len(times) > 1 else 0.0
    return times[-1] + max(0.0, growth) * (index - len(times) + 1)
