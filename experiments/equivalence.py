"""Is a strategy's greedy output its twin's? Every mismatch is graded; none is explained away.

`exact`: all tokens equal. `near_tie`: at the first mismatch, replaying the committed text without a drafter gives
the twin's token in single tokens and the strategy's token with the strategy's pass boundaries, so that only the
shape of the pass made the difference (low precision rounds otherwise in a wider pass). Else `diverged`: a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.replay import Position, recorded_plan, replay, single_token_plan
from experiments.trace import Trace
from specdec.decoding.base import DecodingParts
from specdec.types import Request

EXACT, NEAR_TIE, DIVERGED, NOT_APPLICABLE = "exact", "near_tie", "diverged", "n/a"


@dataclass(frozen=True)
class Comparison:
    """One request against its twin. `position` is the first differing new token, None when all are equal."""

    request_id: int
    grade: str
    position: int | None = None
    token_id: int | None = None
    twin_token_id: int | None = None


def first_mismatch(tokens: Sequence[int], twin: Sequence[int]) -> int | None:
    """Index of the first differing token; where one text merely ends earlier, the index behind its end."""
    for index, (ours, theirs) in enumerate(zip(tokens, twin, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(twin) else min(len(tokens), len(twin))


def compare_block(
    trace: Trace,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    twin_answers: Mapping[int, Sequence[int]],
    fresh_parts: Callable[[], DecodingParts],
) -> list[Comparison]:
    """Grade every request of one block; `trace` is the strategy's. `fresh_parts` builds a runner for a replay."""
    mismatches = {
        request.request_id: first_mismatch(answers[request.request_id], twin_answers[request.request_id])
        for request in block
    }
    open_ones: list[Position] = [(i, n) for i, n in mismatches.items() if n is not None]
    near_ties = (
        _near_ties(trace, block, answers, twin_answers, open_ones, fresh_parts) if open_ones else set()
    )
    return [
        Comparison(request_id, EXACT)
        if position is None
        else Comparison(
            request_id,
            NEAR_TIE if (request_id, position) in near_ties else DIVERGED,
            position,
            _token_at(answers[request_id], position),
            _token_at(twin_answers[request_id], position),
        )
        for request_id, position in mismatches.items()
    ]


def overall(comparisons: Sequence[Comparison]) -> str:
    """The worst grade; n/a for none."""
    grades = {comparison.grade for comparison in comparisons}
    return next((grade for grade in (DIVERGED, NEAR_TIE, EXACT) if grade in grades), NOT_APPLICABLE)


def quality(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """`quality/...` counts of the grades; empty for none."""
    if not comparisons:
        return {}
    grades = [comparison.grade for comparison in comparisons]
    return {
        "quality/exact_match_pct": 100 * grades.count(EXACT) / len(grades),
        "quality/near_tie_n": grades.count(NEAR_TIE),
        "quality/diverged_n": grades.count(DIVERGED),
    }


def _near_ties(
    trace: Trace,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    twin_answers: Mapping[int, Sequence[int]],
    positions: Sequence[Position],
    fresh_parts: Callable[[], DecodingParts],
) -> set[Position]:
    narrow = replay(fresh_parts(), block, twin_answers, single_token_plan(twin_answers), positions)
    wide = _as_run(trace, block, answers, positions, fresh_parts)
    return {
        position
        for position in positions
        if narrow.get(position) == _token_at(twin_answers[position[0]], position[1])
        and wide.get(position) == _token_at(answers[position[0]], position[1])
    }


def _as_run(
    trace: Trace,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    positions: Sequence[Position],
    fresh_parts: Callable[[], DecodingParts],
) -> dict[Position, int]:
    """The target's tokens with the run's own pass boundaries."""
    if any(event.phase == "verify" for event in trace.passes):
        return replay(fresh_parts(), block, answers, recorded_plan(trace), positions)
    # Each token was written behind a pass over the whole text before it.
    prompts = {request.request_id: request.prompt_ids for request in block}
    runner = fresh_parts().runner
    said = {}
    for request_id, index in positions:
        logits = runner.prefill([[*prompts[request_id], *answers[request_id][:index]]], [0])
        said[(request_id, index)] = int(logits.argmax(-1))
        runner.release(0)
    return said


def _token_at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
