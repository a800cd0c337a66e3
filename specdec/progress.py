"""Which requests are where: waiting, in a slot, finished; and where each answer ends.

Active rows are always slots 0..n-1. A freed slot goes to a waiting request; when none waits, the last row moves
into the gap, so that no pass ever gathers rows or computes finished ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specdec.types import Phase, Request, StepOutput, StopRule


@dataclass(frozen=True)
class StopTokens:
    """The answer ends with (and includes) the first of these token ids."""

    token_ids: Collection[int] = ()

    def first_end(self, token_ids: Sequence[int], start: int) -> int | None:
        return next((i + 1 for i in range(start, len(token_ids)) if token_ids[i] in self.token_ids), None)


@dataclass
class Row:
    """A request in a slot: its whole text so far, and how its draft tokens fared."""

    request: Request
    slot: int
    token_ids: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return self.request.max_length - len(self.token_ids)


@dataclass(frozen=True)
class Vacancy:
    """A slot that is free from now on; `replacement` is the slot whose row moves there, if any."""

    slot: int
    replacement: int | None = None


class Progress:
    """The rows of a run of requests over `num_slots` slots."""

    def __init__(self, requests: Sequence[Request], num_slots: int, stop_rule: StopRule) -> None:
        if len({request.request_id for request in requests}) < len(requests):
            raise ValueError("two requests have the same request_id: they would share their random draws")
        self._waiting = deque(requests)
        self._num_slots = num_slots
        self._stop_rule = stop_rule
        self._unread: list[Row] = []
        self.rows: list[Row] = []

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self.rows)

    def admit(self) -> list[Row]:
        """Waiting requests take the free slots: the rows whose prompts have to be read now."""
        while self._waiting and len(self.rows) < self._num_slots:
            self.rows.append(self._new_row(len(self.rows)))
        admitted, self._unread = self._unread, []
        return admitted

    def commit(
        self,
        phase: Phase,
        rows: Sequence[Row],
        proposed: Sequence[Sequence[int]],
        drafted: Sequence[int] | None = None,
    ) -> StepOutput:
        """Append the tokens `proposed` to each row's text, cut at its stop or limit.

        A step's tokens are its accepted draft tokens plus one, so where it is cut the last token that remains
        stands for that one. Draft tokens behind a stop count neither as drafted nor as accepted.
        """
        kept = [self._append(row, tokens) for row, tokens in zip(rows, proposed, strict=True)]
        counts = []
        for row, tokens, whole, num_drafted in zip(
            rows, kept, proposed, drafted or [0] * len(rows), strict=True
        ):
            accepted = len(tokens) - 1
            if len(tokens) < len(whole):
                num_drafted = accepted
            elif row.finished:
                num_drafted = min(num_drafted, len(tokens))
            counts.append((num_drafted, accepted))
            row.drafted += num_drafted
            row.accepted += accepted
        return StepOutput(
            phase=phase,
            request_ids=tuple(row.request.request_id for row in rows),
            committed=tuple(map(tuple, kept)),
            drafted=tuple(drafted for drafted, _ in counts),
            accepted=tuple(accepted for _, accepted in counts),
            finished=tuple(row.finished for row in rows),
            cut=tuple(len(tokens) < len(whole) for tokens, whole in zip(kept, proposed, strict=True)),
        )

    def retire(self) -> list[Vacancy]:
        """Drop finished rows and fill the gaps they leave: what every cache of these rows must do alike, in order."""
        vacancies = []
        for slot, row in enumerate(self.rows):
            if row.finished and self._waiting:
                self.rows[slot] = self._new_row(slot)
                vacancies.append(Vacancy(slot))
        slot = 0
        while slot < len(self.rows):
            if self.rows[-1].finished:
                vacancies.append(Vacancy(self.rows.pop().slot))
            elif self.rows[slot].finished:
                vacancies.append(self._close_gap(slot))
            else:
                slot += 1
        return vacancies

    def _close_gap(self, slot: int) -> Vacancy:
        last = self.rows.pop()
        vacancy = Vacancy(slot, replacement=last.slot)
        last.slot = slot
        self.rows[slot] = last
        return vacancy

    def _new_row(self, slot: int) -> Row:
        row = Row(self._waiting.popleft(), slot)
        self._unread.append(row)
        return row

    def _append(self, row: Row, tokens: Sequence[int]) -> list[int]:
        before, prompt_length = len(row.token_ids), len(row.request.prompt_ids)
        row.token_ids.extend(tokens[: row.remaining])
        stop_rule = row.request.stop_rule or self._stop_rule
        end = stop_rule.first_end(row.token_ids[prompt_length:], before - prompt_length)
        if end is not None:
            del row.token_ids[prompt_length + end :]
        row.finished = end is not None or row.remaining == 0
        return row.token_ids[before:]
