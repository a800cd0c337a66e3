"""Stops, limits, accounting, and which row is in which slot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.progress import Progress, StopTokens, Vacancy
from specdec.types import Phase, Request, StepOutput

STOP = 99


def progress_of(limits: Sequence[int], num_slots: int, stop_ids: Sequence[int] = (STOP,)) -> Progress:
    requests = [Request(10 + i, (1, 2, 3), limit) for i, limit in enumerate(limits)]
    return Progress(requests, num_slots, StopTokens(stop_ids))


def commit_one(tokens: Sequence[int], limit: int = 20, drafted: int = 5) -> tuple[Progress, StepOutput]:
    progress = progress_of([limit], 1)
    rows = progress.admit()
    return progress, progress.commit(Phase.VERIFY, rows, [tokens], [drafted])


@pytest.mark.parametrize(
    ("tokens", "drafted", "limit", "committed", "counted_drafted", "accepted", "finished"),
    [
        # the stop is an accepted draft token: it stands for the step's last token, what follows never was
        ([11, 12, STOP, 14, 15, 16], 5, 20, 3, 2, 2, True),
        ([STOP, 12, 13, 14, 15, 16], 5, 20, 1, 0, 0, True),
        ([11, 12, 13, 14, STOP, 16], 5, 20, 5, 4, 4, True),
        # the stop is the bonus token
        ([11, 12, 13, 14, 15, STOP], 5, 20, 6, 5, 5, True),
        # the stop is the recovered token: one draft token was judged and rejected, the others lay behind the stop
        ([11, 12, STOP], 5, 20, 3, 3, 2, True),
        ([STOP], 5, 20, 1, 1, 0, True),
        # no stop
        ([11, 12, 13, 14, 15, 16], 5, 20, 6, 5, 5, False),
        ([11], 5, 20, 1, 5, 0, False),
        ([11], 0, 20, 1, 0, 0, False),
        # the limit
        ([11, 12, 13, 14, 15, 16], 5, 6, 6, 5, 5, True),
        ([11, 12, 13, 14, 15, 16], 5, 4, 4, 3, 3, True),
        ([11, 12, 13, 14, 15, 16], 5, 1, 1, 0, 0, True),
        # both: the first that comes
        ([11, STOP, 13, 14], 3, 3, 2, 1, 1, True),
        ([11, 12, STOP, 14], 3, 2, 2, 1, 1, True),
        # two stops
        ([11, STOP, 13, STOP], 3, 20, 2, 1, 1, True),
    ],
)
def test_accounting(
    tokens: list[int],
    drafted: int,
    limit: int,
    committed: int,
    counted_drafted: int,
    accepted: int,
    finished: bool,
) -> None:
    progress, step = commit_one(tokens, limit, drafted)
    assert step.committed == (tuple(tokens[:committed]),)
    assert step.drafted == (counted_drafted,)
    assert step.accepted == (accepted,)
    assert step.finished == (finished,)
    assert progress.rows[0].token_ids == [1, 2, 3, *tokens[:committed]]


@pytest.mark.parametrize(
    ("tokens", "drafted", "kinds"),
    [
        ([11, 12, 13], 2, "accepted accepted bonus"),
        ([11, 12, 13], 5, "accepted accepted recovered"),
        ([11], 5, "recovered"),
        ([11], 0, "plain"),
        # the stop: recovered, bonus, and a draft token that others followed
        ([11, 12, STOP], 5, "accepted accepted recovered"),
        ([11, 12, STOP], 2, "accepted accepted bonus"),
        ([11, STOP, 13], 2, "accepted accepted"),
        ([STOP, 12], 1, "accepted"),
    ],
)
def test_kinds_of_tokens(tokens: list[int], drafted: int, kinds: str) -> None:
    _, step = commit_one(tokens, drafted=drafted)
    assert step.kinds(0) == tuple(kinds.split())
    assert step.cut == (len(kinds.split()) < len(tokens),)


def test_a_row_sums_up_its_steps() -> None:
    progress = progress_of([20], 1)
    [row] = progress.admit()
    progress.commit(Phase.PREFILL, [row], [[7]])
    progress.commit(Phase.VERIFY, [row], [[11, 12]], [4])
    progress.commit(Phase.VERIFY, [row], [[13, STOP, 15]], [2])
    assert (row.drafted, row.accepted) == (4 + 1, 1 + 1)
    assert row.remaining == 20 - 5


def test_the_prompts_own_stop_tokens_do_not_stop_it() -> None:
    progress = progress_of([4], 1, stop_ids=[1, 2, 3])
    step = progress.commit(Phase.PREFILL, progress.admit(), [[8]])
    assert step.finished == (False,)
    assert progress.commit(Phase.DECODE, progress.rows, [[3]]).finished == (True,)


def test_stop_tokens() -> None:
    rule = StopTokens([5, 6])
    assert rule.first_end([5, 1, 6, 5], 1) == 3
    assert rule.first_end([5, 1, 6, 5], 3) == 4
    assert rule.first_end([5, 1, 2], 1) is None
    assert StopTokens().first_end([5, 1, 2], 0) is None


def test_a_stop_rule_sees_the_whole_answer_and_nothing_else() -> None:
    """A stop string may begin in an earlier step: (3, 8) ends the text, but not where the 3 is the prompt's."""

    class Pair:
        def first_end(self, token_ids: Sequence[int], start: int) -> int | None:
            ends = (i + 1 for i in range(max(start, 1), len(token_ids)) if token_ids[i - 1 : i + 1] == [3, 8])
            return next(ends, None)

    progress = Progress([Request(0, (1, 3), 9)], 1, Pair())
    rows = progress.admit()
    step = progress.commit(Phase.PREFILL, rows, [[8]])
    assert (step.committed, step.finished) == (((8,),), (False,))
    progress.commit(Phase.DECODE, rows, [[3]])
    step = progress.commit(Phase.VERIFY, rows, [[8, 7, 7]], [2])
    assert (step.committed, step.finished) == (((8,),), (True,))


def test_a_request_may_have_a_stop_rule_of_its_own() -> None:
    requests = [Request(0, (1,), 9, StopTokens([5])), Request(1, (1,), 9)]
    progress = Progress(requests, 2, StopTokens([6]))
    step = progress.commit(Phase.VERIFY, progress.admit(), [[6, 5, 7], [5, 6, 7]], [2, 2])
    assert step.committed == ((6, 5), (5, 6))


def finish(progress: Progress, request_ids: Sequence[int]) -> list[Vacancy]:
    """One step in which these requests write a stop and the others an ordinary token."""
    stopping = [row.request.request_id in request_ids for row in progress.rows]
    progress.commit(Phase.DECODE, progress.rows, [[STOP if stops else 7] for stops in stopping])
    return progress.retire()


def occupants(progress: Progress) -> list[int]:
    """Request ids by slot; also checks that the active rows are a prefix of the slots."""
    assert [row.slot for row in progress.rows] == list(range(len(progress.rows)))
    return [row.request.request_id for row in progress.rows]


def test_requests_take_slots_in_order() -> None:
    progress = progress_of([9] * 5, 3)
    assert [row.request.request_id for row in progress.admit()] == [10, 11, 12]
    assert occupants(progress) == [10, 11, 12]
    assert progress.admit() == []


def test_a_waiting_request_takes_a_free_slot() -> None:
    progress = progress_of([9] * 5, 3)
    progress.admit()
    assert finish(progress, [11]) == [Vacancy(1)]
    assert occupants(progress) == [10, 13, 12]
    assert [(row.request.request_id, row.slot) for row in progress.admit()] == [(13, 1)]


@pytest.mark.parametrize(
    ("finished", "vacancies", "left"),
    [
        ([13], [Vacancy(3)], [10, 11, 12]),
        ([10], [Vacancy(0, 3)], [13, 11, 12]),
        ([11, 13], [Vacancy(3), Vacancy(1, 2)], [10, 12]),
        ([10, 11], [Vacancy(0, 3), Vacancy(1, 2)], [13, 12]),
        ([10, 11, 12], [Vacancy(0, 3), Vacancy(2), Vacancy(1)], [13]),  # a row moves at most once
        ([10, 11, 12, 13], [Vacancy(3), Vacancy(2), Vacancy(1), Vacancy(0)], []),
        ([], [], [10, 11, 12, 13]),
    ],
)
def test_gaps_are_filled_from_the_end(finished: list[int], vacancies: list[Vacancy], left: list[int]) -> None:
    progress = progress_of([9] * 4, 4)
    progress.admit()
    assert finish(progress, finished) == vacancies
    assert occupants(progress) == left


def test_a_waiting_request_takes_the_first_gap() -> None:
    """Slots 0 and 2 become free, one request waits: it takes slot 0, so that nothing has to move."""
    progress = progress_of([9] * 4, 3)
    progress.admit()
    assert finish(progress, [10, 12]) == [Vacancy(0), Vacancy(2)]
    assert occupants(progress) == [13, 11]
    assert [(row.request.request_id, row.slot) for row in progress.admit()] == [(13, 0)]


def test_all_is_done_when_all_is_done() -> None:
    progress = progress_of([1, 1, 1], 2)
    steps = 0
    while progress.unfinished:
        steps += 1
        progress.commit(Phase.PREFILL, progress.admit(), [[7]] * len(progress.rows))
        progress.retire()
    assert steps == 2
    assert Progress([], 2, StopTokens()).unfinished is False


def test_requests_that_would_share_draws_are_refused() -> None:
    requests = [Request(3, (1, 2), 4), Request(3, (1,), 4)]
    with pytest.raises(ValueError, match="same request_id"):
        Progress(requests, 1, StopTokens())
