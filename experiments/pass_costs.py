"""How long passes and proposals take here: what the draft length `cost_model` chooses by."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from specdec.costs import PassCosts
from specdec.decoding.base import DecodingParts
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.types import Request, Verification

TRIES = 5
CONTEXT = 64
Clock = Callable[[], float]


def measure_costs(
    parts: DecodingParts, num_drafted: int, capacity: int, clock: Clock = time.perf_counter
) -> PassCosts:
    """Milliseconds of target passes over 1..K + 1 tokens, and of proposals of 0..K, for one row of a short text.

    Caches hold `capacity` tokens: where that is less, the text is shorter, and at last K smaller. Leaves the caches of
    runner and drafter as they were: empty. But the drafter has seen that text, and may remember it for later ones: give
    one that decodes nothing afterwards.
    """
    assert parts.drafter is not None
    length = max(2, min(CONTEXT, capacity - num_drafted))  # the cache holds all but its newest token
    num_drafted = min(num_drafted, capacity - length)
    period = min(16, parts.runner.vocab_size)
    prompt = tuple(number % period for number in range(length))  # copying drafters find something
    row = Row(Request(0, prompt, num_drafted + 2), slot=0)
    parts.runner.prefill([prompt[:-1]], [0])
    try:
        target = [_pass_ms(parts, row, count, clock) for count in range(1, num_drafted + 2)]
        draft = [_proposal_ms(parts, row, count, clock) for count in range(num_drafted + 1)]
    finally:
        parts.drafter.vacate(Vacancy(0))
        parts.runner.release(0)
    return PassCosts(tuple(target), tuple(draft))


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


def _proposal_ms(parts: DecodingParts, row: Row, count: int, clock: Clock) -> float:
    """Of a drafter that has read the text, as it has between two steps."""
    drafter = parts.drafter
    assert drafter is not None
    draws = BlockDraws.of(parts.draws, [0], [len(row.token_ids)], parts.runner.device)
    # What it has read when a step begins: all but the newest token.
    before = Row(Request(0, tuple(row.token_ids[:-1]), count + 2), row.slot)

    def propose() -> None:
        drafter.propose([row], [count], lambda logits, step: [True], draws)
        _wait(parts)

    def forget() -> None:
        drafter.accept([before], Verification((0,), (0,)))

    return _median_ms(propose, clock, forget)


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
