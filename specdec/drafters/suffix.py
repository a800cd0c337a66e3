"""Draft what most often followed the longest suffix of the text that occurred before.

The text so far is kept in a suffix automaton (Blumer et al. 1985), which is extended by one token in constant time and
knows at each moment the longest suffix that occurred earlier: no limit on the length of a match, and no search. On
request one automaton also learns the texts of all requests, so that what one answer says can be copied into another.
(Suffix trees for drafting: Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.types import DraftProposal, GoOn


class SuffixAutomaton:
    """All substrings of a growing text. States are numbers, 0 is the empty string."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._followed_by: list[Counter[int]] = [Counter()]
        self._last = 0

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        self._note_followers(token)
        state = self._new(self._length[self._last] + 1, 0)
        place: int = self._last
        while place >= 0 and token not in self._next[place]:
            self._next[place][token] = state
            place = self._link[place]
        if place >= 0:
            self._link[state] = self._link_target(place, token)
        self._last = state

    def match(self, token_ids: Sequence[int], longest: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of `token_ids`, at most `longest`, that occurs in the text."""
        state = length = 0
        for token in token_ids[-longest:]:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return state, length

    def earlier_suffix(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text itself that also occurred before."""
        state = self._link[self._last] if self._last else 0
        return state, self._length[state]

    def continuation(self, state: int, count: int) -> list[int]:
        """What most often followed, token by token; ties go to the one seen first."""
        found: list[int] = []
        while len(found) < count and self._followed_by[state]:
            token = self._followed_by[state].most_common(1)[0][0]
            found.append(token)
            state = self._next[state].get(token, 0)
            if not state:
                break
        return found

    def _note_followers(self, token: int) -> None:
        """The text's suffixes that occurred before are followed by this token once more."""
        place = self._last
        while place > 0:
            self._followed_by[place][token] += 1
            place = self._link[place]

    def _link_target(self, place: int, token: int) -> int:
        target = self._next[place][token]
        if self._length[target] == self._length[place] + 1:
            return target
        clone = self._new(self._length[place] + 1, self._link[target])
        self._next[clone] = dict(self._next[target])
        self._followed_by[clone] = Counter(self._followed_by[target])
        while place >= 0 and self._next[place].get(token) == target:
            self._next[place][token] = clone
            place = self._link[place]
        self._link[target] = clone
        return clone

    def _new(self, length: int, link: int) -> int:
        self._next.append({})
        self._link.append(link)
        self._length.append(length)
        self._followed_by.append(Counter())
        return len(self._next) - 1


@dataclass
class _Known:
    """What the drafter has seen of a row's text."""

    row: Row
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_seen: int = 0


class SuffixDrafter(Drafter):
    """Copies behind the longest match of at least `min_match` tokens; the row's own text wins a tie.

    The draft is certain (a one-hot law), so `go_on`, which looks at laws, is not asked.
    """

    def __init__(self, min_match: int, max_match: int, shared: bool, device: torch.device) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.device = device
        self._others = SuffixAutomaton() if shared else None
        self._known: dict[int, _Known] = {}

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        drafts = [self._continuation(row, limit) for row, limit in zip(rows, limits, strict=True)]
        return DraftProposal.certain(drafts, self.device)

    def vacate(self, vacancy: Vacancy) -> None:
        finished = self._known.pop(vacancy.slot, None)
        if finished is not None and self._others is not None:
            for token in finished.row.token_ids:
                self._others.extend(token)
            self._others.extend(
                -1 - finished.row.request.request_id
            )  # no match reaches over the end of a text
        if vacancy.replacement is not None and vacancy.replacement in self._known:
            self._known[vacancy.slot] = self._known.pop(vacancy.replacement)

    def _continuation(self, row: Row, limit: int) -> Sequence[int]:
        known = self._known.get(row.slot)
        if known is None or known.row is not row:
            known = self._known[row.slot] = _Known(row)
        for token in row.token_ids[known.num_seen :]:
            known.automaton.extend(token)
        known.num_seen = len(row.token_ids)
        if limit < 1:
            return []
        automaton, (state, length) = known.automaton, known.automaton.earlier_suffix()
        if self._others is not None:
            elsewhere, its_length = self._others.match(row.token_ids, self.max_match)
            if its_length > length:
                automaton, state, length = self._others, elsewhere, its_length
        if length < self.min_match:
            return []
        return [token for token in automaton.continuation(state, limit) if token >= 0]


@dataclass
class SuffixOptions(DrafterOptions):
    """Matches of `min_match` tokens or more are copied.

    `shared`: also from the texts of earlier requests of the run, of which up to `max_match` tokens are compared. A
    prompt that is measured again is then copied from its first answer: leave `measure.repeats` at 1.
    """

    min_match: int = 2
    max_match: int = 64
    shared: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match={self.min_match}, max_match={self.max_match}: expected 1 <= min <= max"
            )

    def build(self, context: DrafterContext) -> SuffixDrafter:
        return SuffixDrafter(self.min_match, self.max_match, self.shared, context.device)
