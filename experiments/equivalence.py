"""Is a strategy's greedy output its twin's? Every mismatch is graded; none is explained away.

`exact`: all tokens equal. `near_tie`: at the first mismatch, replaying the committed text without a drafter gives
the twin's token in single tokens and the strategy's token with the strategy's pass boundaries (low precision rounds
otherwise in a wider pass), and the two logits are no further apart than rounding moves them. Else `diverged`: a bug.

The second condition is there because a replay rolls back as the run did: a fault of the rollback would come back in
it and look like the shape of the pass. How far rounding moves logits is measured where nothing is rolled back: the
text in single tokens against the same text in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from experiments.text_replay import Position, read_at_once, recorded_plan, replay, single_token_plan
from experiments.trace import Trace, timelines
from specdec.decoding.base import DecodingParts
from specdec.types import Request

EXACT, NEAR_TIE, DIVERGED, NOT_APPLICABLE = "exact", "near_tie", "diverged", "n/a"


# What replays of a twin's engine gave, by what was replayed: in single tokens, and read at once.
Memory = dict[object, tuple[dict[Position, Tensor], dict[Position, Tensor]]]


@dataclass(frozen=True)
class Comparison:
    """One request against its twin. `position` is the first differing new token, None when all are equal.

    `margin` is how far apart the two tokens' logits are, and `rounding` how far another shape of pass moves any
    logit at that position; None where a text ends there, or at a first token.
    """

    request_id: int
    grade: str
    position: int | None = None
    token_id: int | None = None
    twin_token_id: int | None = None
    margin: float | None = None
    rounding: float | None = None


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
    memory: Memory | None = None,
) -> list[Comparison]:
    """Grade every request of one block; `trace` is the strategy's. `fresh_parts` builds a runner for a replay.

    What `memory` has is not replayed again: give one to all arms that have the same twin.
    """
    mismatches = {
        request.request_id: first_mismatch(answers[request.request_id], twin_answers[request.request_id])
        for request in block
    }
    open_ones: list[Position] = [(i, n) for i, n in mismatches.items() if n is not None]
    memory = {} if memory is None else memory
    evidence = (
        _evidence(trace, block, answers, twin_answers, open_ones, fresh_parts, memory) if open_ones else {}
    )
    return [
        Comparison(request_id, EXACT)
        if position is None
        else _mismatch(
            request_id,
            position,
            _token_at(answers[request_id], position),
            _token_at(twin_answers[request_id], position),
            evidence.get((request_id, position)),
        )
        for request_id, position in mismatches.items()
    ]


def compare_traces(
    traces: Sequence[Trace],
    twin_traces: Sequence[Trace],
    blocks: Sequence[Sequence[Request]],
    fresh_parts: Callable[[], DecodingParts],
    memory: Memory | None = None,
) -> list[Comparison]:
    """Grade every request of every (repeat, block) of one arm against its twin's, greedy decoding of both assumed.

    Repeats that wrote the same texts in the same passes are replayed once.
    """
    twins = {(trace.repeat, trace.block): trace for trace in twin_traces}
    memory = {} if memory is None else memory
    known: dict[object, list[Comparison]] = {}
    found: list[Comparison] = []
    for trace in traces:
        answers, twin_answers = _answers(trace), _answers(twins[trace.repeat, trace.block])
        counts = tuple(event.counts for event in trace.passes)
        key = (trace.block, tuple(answers.items()), tuple(twin_answers.items()), counts)
        if key not in known:
            known[key] = compare_block(trace, blocks[trace.block], answers, twin_answers, fresh_parts, memory)
        found.extend(known[key])
    return found


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


@dataclass(frozen=True)
class _Evidence:
    """Logits `[V]` at one position, by the passes that read the text before it."""

    single_tokens: Tensor
    as_run: Tensor
    at_once: Tensor


def _evidence(
    trace: Trace,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    twin_answers: Mapping[int, Sequence[int]],
    positions: Sequence[Position],
    fresh_parts: Callable[[], DecodingParts],
    memory: Memory,
) -> dict[Position, _Evidence]:
    """For the positions that every replay reaches."""
    # Up to its position the text of each is the twin's, so neither replay depends on the strategy.
    key = (tuple(request.request_id for request in block), tuple(twin_answers.items()), tuple(positions))
    if key not in memory:
        single = replay(fresh_parts(), block, twin_answers, single_token_plan(twin_answers), positions)
        memory[key] = single, read_at_once(fresh_parts(), block, answers, positions)
    single, at_once = memory[key]
    as_run = at_once  # how `no_cache` decodes
    if any(event.phase == "verify" for event in trace.passes):
        as_run = replay(fresh_parts(), block, answers, recorded_plan(trace), positions)
    return {
        position: _Evidence(single[position], as_run[position], at_once[position])
        for position in positions
        if position in single and position in as_run
    }


def _mismatch(
    request_id: int, position: int, ours: int | None, twins: int | None, evidence: _Evidence | None
) -> Comparison:
    if ours is None or twins is None or evidence is None:
        return Comparison(request_id, DIVERGED, position, ours, twins)
    margin = float(evidence.single_tokens[twins] - evidence.single_tokens[ours])
    # Banned tokens are at -inf in both.
    moved = (evidence.single_tokens - evidence.at_once).nan_to_num(0.0)
    rounding = float(moved.abs().max())
    reproduced = evidence.single_tokens.argmax() == twins and evidence.as_run.argmax() == ours
    # Either of the two logits may move by as much as any does.
    grade = NEAR_TIE if reproduced and margin <= 2 * rounding else DIVERGED
    return Comparison(request_id, grade, position, ours, twins, margin, rounding)


def _answers(trace: Trace) -> dict[int, tuple[int, ...]]:
    return {timeline.request_id: timeline.token_ids for timeline in timelines(trace)}


def _token_at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
