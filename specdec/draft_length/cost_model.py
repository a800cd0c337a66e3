"""Draft as many tokens as pay: the length with the most expected tokens per unit of time, row by row.

A step that drafts k tokens is expected to write 1 + first * (1 + next + ... + next^(k-1)) tokens, `first` being how
often a row's first draft token stands and `next` how often one stands behind another that did; it takes the time of a
proposal of k tokens and of a pass over k + 1. (Leviathan et al. 2023, section 3.4, choose one length for good, from one
acceptance rate.) Both rates are learnt while decoding, recent tokens counting more, and shrunk towards those of all
rows. Where drafting does not pay the length is 0, which is plain decoding; now and then a short draft asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.costs import PassCosts
from specdec.draft_length.base import DraftLength, DraftLengthOptions
from specdec.progress import Row

# How much one judged token of the past weighs beside the newest, and how many tokens the rows' common rate counts as.
MEMORY = 0.9
PRIOR_TOKENS = 4.0
# What is believed before anything was judged: hopeful, so that drafting is tried.
HOPE = 0.8
# Plain steps before drafting is tried again: doubled after each failure.
FIRST_WAIT, LONGEST_WAIT = 8, 64
TRIAL_TOKENS = 2


@dataclass
class _Rate:
    """A share of successes that forgets."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, success: bool) -> None:
        self.successes = MEMORY * self.successes + success
        self.trials = MEMORY * self.trials + 1

    def shrunk_to(self, common: float) -> float:
        return (self.successes + PRIOR_TOKENS * common) / (self.trials + PRIOR_TOKENS)


@dataclass
class _Acceptance:
    """How often first draft tokens stand, and those behind one that stands."""

    first: _Rate = field(default_factory=_Rate)
    next: _Rate = field(default_factory=_Rate)

    def add(self, drafted: int, accepted: int) -> None:
        for number in range(min(drafted, accepted + 1)):  # those behind a rejected one were not judged
            (self.next if number else self.first).add(number < accepted)


@dataclass
class _RowState:
    acceptance: _Acceptance = field(default_factory=_Acceptance)
    plain_steps: int = 0
    wait: int = FIRST_WAIT


class CostModelDraftLength(DraftLength):
    """See the module."""

    def __init__(self, num_tokens: int, costs: PassCosts) -> None:
        self.num_tokens = num_tokens
        self.costs = costs
        self._common = _Acceptance()
        self._rows: dict[int, _RowState] = {}

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        self._forget_all_but(rows)
        return [self._limit(self._rows.setdefault(row.request.request_id, _RowState())) for row in rows]

    def accept(self, rows: Sequence[Row], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            state = self._rows[row.request.request_id]
            if num_drafted:
                state.plain_steps = 0
                state.acceptance.add(num_drafted, num_accepted)
                self._common.add(num_drafted, num_accepted)
            else:
                state.plain_steps += 1

    def best(self, first: float, following: float) -> int:
        """The number of draft tokens with the most expected tokens per time; 0 where none pays."""
        choices = range(1, self.num_tokens + 1)
        best = max(
            choices, key=lambda count: expected_tokens(count, first, following) / self.costs.step(count)
        )
        gain = expected_tokens(best, first, following) / self.costs.step(best)
        return best if gain > 1 / self.costs.plain else 0

    def _limit(self, state: _RowState) -> int:
        first = state.acceptance.first.shrunk_to(self._common.first.shrunk_to(HOPE))
        following = state.acceptance.next.shrunk_to(self._common.next.shrunk_to(HOPE))
        best = self.best(first, following)
        if best:
            state.wait = FIRST_WAIT
            return best
        if state.plain_steps < state.wait:
            return 0
        state.wait = min(2 * state.wait, LONGEST_WAIT)
        return min(TRIAL_TOKENS, self.num_tokens)

    def _forget_all_but(self, rows: Sequence[Row]) -> None:
        present = {row.request.request_id for row in rows}
        for request_id in [known for known in self._rows if known not in present]:
            del self._rows[request_id]


def expected_tokens(num_drafted: int, first: float, following: float) -> float:
    """Tokens that a step is expected to write, the target's own included."""
    behind = sum(following**number for number in range(num_drafted))
    return 1 + first * behind


@dataclass
class CostModelOptions(DraftLengthOptions):
    """From 0 to `max` tokens, whatever pays."""

    max: int = 8

    @property
    def needs_costs(self) -> bool:
        return True

    def build(self, costs: PassCosts | None = None) -> CostModelDraftLength:
        if costs is None:
            raise ValueError("draft_length=cost_model needs the measured times of passes")
        return CostModelDraftLength(self.max, costs)
