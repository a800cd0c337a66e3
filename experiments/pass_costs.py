"""How long passes and proposals take here: what the draft length `cost_model` chooses by.

Proposals are timed behind two texts, one that repeats itself and one that does not, since a drafter may copy behind
one and ask a model behind the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from specdec.costs import PassCosts
from specdec.decoding.base import DecodingParts
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.types import Request, Verification

TRIES = 5
CONTEXT = 64
PERIOD = 16  # of the text that repeats itself
Clock = Callable[[], float]


def measure_costs(
    parts: DecodingParts, num_drafted: int, capacity: int, clock: Clock = time.perf_counter
) -> PassCosts:
    """Milliseconds of target passes over 1..K + 1 tokens, and of proposals of 0..K, for one row of a short text.

    Caches hold `capacity` tokens: where that is less, the text is shorter, and at last K smaller. Leaves the caches of
    runner and drafter as they were: empty. But the drafter has seen that text, and may remember it for later ones: give
    one that decodes nothing afterwards.
    """
    length = max(2, min(CONTEXT, capacity - num_drafted))  # the cache holds all but its newest token
    num_drafted = min(num_drafted, capacity - length)
    vocab_size = parts.runner.vocab_size
    period = min(PERIOD, vocab_size)
    texts = [tuple(number % period for number in range(length)), tuple(range(min(length, vocab_size)))]
    target: list[float] = []
    draft: dict[str, tuple[float, ...]] = {}
    unread_token_ms = 0.0
    for text in texts:
        row = Row(Request(0, text, num_drafted + 2), slot=0)
        with _prepared(parts, row) as drafter:
            target = target or [_pass_ms(parts, row, count, clock) for count in range(1, num_drafted + 2)]
            (prospect,) = drafter.prospects([row])
            if prospect.kind not in draft:
                times = [_proposal_ms(parts, drafter, row, count, clock) for count in range(num_drafted + 1)]
                draft[prospect.kind] = tuple(times)
                if prospect.unread and num_drafted:
                    drafter.vacate(Vacancy(row.slot))
                    unread_token_ms = _unread_token_ms(parts, drafter, row, prospect.unread, times[1], clock)
    return PassCosts(tuple(target), draft, unread_token_ms)


@contextmanager
def _prepared(parts: DecodingParts, row: Row) -> Iterator[Drafter]:
    """The target has read the row's text; afterwards neither it nor the drafter holds anything."""
    assert parts.drafter is not None
    parts.runner.prefill([row.token_ids[:-1]], [row.slot])
    try:
        yield parts.drafter
    finally:
        parts.drafter.vacate(Vacancy(row.slot))
        parts.runner.release(row.slot)


def _pass_ms(parts: DecodingParts, row: Row, count: int, clock: Clock) -> float:
    tokens = torch.zeros(1, count, dtype=torch.long, device=parts.runner.device)

    def one_pass() -> None:
        if count == 1:
            parts.runner.decode(tokens)
        else:
            parts.runner.verify(tokens, [count])
        _wait(parts)
        parts.runner.commit([len(row.token_ids) - 1])

    return _median_ms(one_pass, clock)


def _unread_token_ms(
    parts: DecodingParts, drafter: Drafter, row: Row, unread: int, proposal_ms: float, clock: Clock
) -> float:
    """Per token that the drafter has to read first: what proposing one then takes beyond `proposal_ms`."""
    draws = _draws(parts, row)

    def propose() -> None:
        drafter.propose([row], [1], _always, draws)
        _wait(parts)

    first_ms = _median_ms(propose, clock, lambda: drafter.vacate(Vacancy(row.slot)))
    return max(0.0, first_ms - proposal_ms) / unread


def _proposal_ms(parts: DecodingParts, drafter: Drafter, row: Row, count: int, clock: Clock) -> float:
    """Of a drafter that has read the text, as it has between two steps."""
    draws = _draws(parts, row)
    # What it has read when a step begins: all but the newest token.
    before = Row(Request(0, tuple(row.token_ids[:-1]), count + 2), row.slot)

    def propose() -> None:
        drafter.propose([row], [count], _always, draws)
        _wait(parts)

    def forget() -> None:
        drafter.accept([before], Verification((0,), (0,)))

    return _median_ms(propose, clock, forget)


def _draws(parts: DecodingParts, row: Row) -> BlockDraws:
    return BlockDraws.of(parts.draws, [0], [len(row.token_ids)], parts.runner.device)


def _always(logits: torch.Tensor, step: int) -> list[bool]:
    return [True]


def _median_ms(
    work: Callable[[], None], clock: Clock, afterwards: Callable[[], None] = lambda: None
) -> float:
    times = []
    for _ in range(TRIES + 1):  # the first one is slow
        start = clock()
        work()
        times.append(clock() - start)
        afterwards()
    return 1e3 * median(times[1:])


def _wait(parts: DecodingParts) -> None:
    if parts.runner.device.type == "cuda":
        torch.cuda.synchronize(parts.runner.device)
