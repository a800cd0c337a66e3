"""Draft as many tokens as pay: the length with the most expected tokens per unit of time, row by row.

A step that drafts k tokens is expected to write 1 + first * (1 + next + ... + next^(k-1)) tokens, `first` being how
often a row's first draft token stands and `next` how often one stands behind another that did; it takes the time of a
proposal of k tokens and of a pass over k + 1. (Leviathan et al. 2023, section 3.4, choose one length for good, from one
acceptance rate.) Both rates are learnt while decoding, for each kind of proposal, recent tokens counting more, and
shrunk towards those of all rows so far. Where drafting does not pay the length is 0, which is plain decoding; drafting
is tried again when what that is expected to lose is a small share of the time that went by without, which counts what a
drafter with a cache of its own has missed meanwhile: dear enough, it is asked again by a later row only.

Lengths depend on what other rows accepted and on measured times: with a verifier that draws, a seed's text is then
not the same from run to run (its law is); with `match`, and without temperature, it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.costs import PassCosts
from specdec.draft_length.base import DraftLength, DraftLengthOptions
from specdec.progress import Row
from specdec.types import Prospect

# How much one judged token of the past weighs beside the newest: of a row, and of all rows together.
ROW_MEMORY = 0.9
COMMON_MEMORY = 0.99
# How many tokens the rows' common rate counts as, beside a row's own.
PRIOR_TOKENS = 4.0
# What is believed before anything was judged: hopeful, so that drafting is tried.
HOPE = 0.8
# What trials may lose of the time that plain steps took.
TRIAL_FRAC = 0.02


@dataclass
class _Rate:
    """A share of successes that forgets."""

    memory: float
    successes: float = 0.0
    trials: float = 0.0

    def add(self, success: bool) -> None:
        self.successes = self.memory * self.successes + success
        self.trials = self.memory * self.trials + 1

    def shrunk_to(self, common: float) -> float:
        return (self.successes + PRIOR_TOKENS * common) / (self.trials + PRIOR_TOKENS)


class _Acceptance:
    """How often first draft tokens stand, and those behind one that stands."""

    def __init__(self, memory: float) -> None:
        self.first = _Rate(memory)
        self.next = _Rate(memory)

    def add(self, drafted: int, accepted: int) -> None:
        for number in range(min(drafted, accepted + 1)):  # those behind a rejected one were not judged
            (self.next if number else self.first).add(number < accepted)


@dataclass
class _RowState:
    row: Row
    by_kind: dict[str, _Acceptance] = field(default_factory=dict)
    kind: str = ""
    plain_time: float = 0.0  # since drafting was last tried


class CostModelDraftLength(DraftLength):
    """See the module."""

    def __init__(self, num_tokens: int, costs: PassCosts) -> None:
        self.num_tokens = num_tokens
        self.costs = costs
        self._common: dict[str, _Acceptance] = {}
        self._rows: dict[int, _RowState] = {}
        self._spare_time = 0.0  # plain time of rows that left before it paid for a trial

    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        self._forget_all_but(rows)
        return [
            self._limit(self._state_of(row), prospect, row.remaining)
            for row, prospect in zip(rows, prospects, strict=True)
        ]

    def accept(self, rows: Sequence[Row], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for row, num_drafted, num_accepted in zip(rows, drafted, accepted, strict=True):
            state = self._rows[row.request.request_id]
            if num_drafted:
                state.plain_time = 0.0
                for acceptance in self._acceptances(state):
                    acceptance.add(num_drafted, num_accepted)
            else:
                state.plain_time += self.costs.plain

    def best(self, first: float, following: float, kind: str = Prospect.kind, most: int | None = None) -> int:
        """The number of draft tokens, 1 to `most`, with the least time per expected token."""
        return min(
            range(1, (most or self.num_tokens) + 1),
            key=lambda count: self.costs.step(count, kind) / expected_tokens(count, first, following),
        )

    def _limit(self, state: _RowState, prospect: Prospect, remaining: int) -> int:
        state.kind = prospect.kind
        most = min(self.num_tokens, remaining - 1)  # a step writes one token more than it drafts
        if most < 1:
            return 0
        own, common = self._acceptances(state)
        first = own.first.shrunk_to(common.first.shrunk_to(HOPE))
        following = own.next.shrunk_to(common.next.shrunk_to(HOPE))
        best = self.best(first, following, prospect.kind, most)
        tokens = expected_tokens(best, first, following)
        gain = tokens * self.costs.plain - self.costs.step(best, prospect.kind)
        reading = prospect.unread * self.costs.unread_token
        if gain > 0 and gain * remaining / tokens > reading:  # such steps until the row is full
            return best
        return best if reading - gain <= TRIAL_FRAC * state.plain_time else 0

    def _acceptances(self, state: _RowState) -> tuple[_Acceptance, _Acceptance]:
        """Of the row, and of all rows: with proposals of its present kind."""
        return (
            state.by_kind.setdefault(state.kind, _Acceptance(ROW_MEMORY)),
            self._common.setdefault(state.kind, _Acceptance(COMMON_MEMORY)),
        )

    def _state_of(self, row: Row) -> _RowState:
        """A new row may spend what those before it left: else rows that are short would never try."""
        if row.request.request_id not in self._rows:
            self._rows[row.request.request_id] = _RowState(row, plain_time=self._spare_time)
            self._spare_time = 0.0
        return self._rows[row.request.request_id]

    def _forget_all_but(self, rows: Sequence[Row]) -> None:
        present = {row.request.request_id: row for row in rows}
        for request_id, state in list(self._rows.items()):
            if present.get(request_id) is not state.row:  # another text may have the same id
                self._spare_time += state.plain_time
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
