"""Traces written by hand. Times are seconds on a binary grid, so that sums and differences are exact."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.trace import PassEvent, ProposalEvent, RequestTimeline, StepEvent, Trace
from specdec.types import Phase, StepOutput


def step(
    start_s: float,
    end_s: float,
    phase: str,
    committed: dict[int, Sequence[int]],
    drafted: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
) -> StepEvent:
    """`committed` are the new tokens by request."""
    rows = len(committed)
    output = StepOutput(
        phase=Phase(phase),
        request_ids=tuple(committed),
        committed=tuple(map(tuple, committed.values())),
        drafted=tuple(drafted or [0] * rows),
        accepted=tuple(accepted or [0] * rows),
        finished=(False,) * rows,
        cut=(False,) * rows,
    )
    return StepEvent(start_s, end_s, output)


def forward(
    phase: str, start_s: float, end_s: float, counts: Sequence[int] = (1,), kv_tokens: int = 8
) -> PassEvent:
    lengths = (kv_tokens,) + (0,) * (len(counts) - 1)
    return PassEvent(phase, start_s, end_s, tuple(counts), max(counts), lengths, kv_tokens)


def trace(
    *steps: StepEvent,
    passes: Sequence[PassEvent] = (),
    proposals: Sequence[tuple[float, float]] = (),
    arm: str = "strategy",
    repeat: int = 0,
    block: int = 0,
    start_s: float = 0.0,
) -> Trace:
    end_s = steps[-1].end_s if steps else start_s
    events = [ProposalEvent(*span) for span in proposals]
    return Trace(arm, repeat, block, start_s, end_s, list(steps), list(passes), events)


def timeline(
    times: Sequence[float],
    sizes: Sequence[int] | None = None,
    *,
    request_id: int = 0,
    repeat: int = 0,
    admitted_s: float = 0.0,
    token_ids: Sequence[int] | None = None,
) -> RequestTimeline:
    """Commits of `sizes` tokens (default: one each) at `times`; token ids count up unless given."""
    sizes = [1] * len(times) if sizes is None else sizes
    ids = range(sum(sizes)) if token_ids is None else token_ids
    return RequestTimeline(request_id, repeat, 0.0, admitted_s, tuple(times), tuple(sizes), tuple(ids))
