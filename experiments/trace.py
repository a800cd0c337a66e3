"""What happened when: the events of a run, as recorded by `measure` and read by `metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.types import StepOutput


@dataclass(frozen=True)
class PassEvent:
    """One forward pass; a prompt read in chunks is one event of `num_passes`.

    `phase` is prefill, decode, verify (target), draft_prefill or draft (draft model). `counts` are the real tokens of
    each row, `width` the tokens per row with padding, `kv_lengths` the cached tokens of each row of the pass
    afterwards, `other_kv_lengths` those of the slots that are not in it, and `kv_tokens` those of all slots together.
    """

    phase: str
    start_s: float
    end_s: float
    counts: tuple[int, ...]
    width: int
    kv_lengths: tuple[int, ...]
    kv_tokens: int
    num_passes: int = 1
    other_kv_lengths: tuple[int, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ProposalEvent:
    """The time in which a drafter made one proposal, its own passes included."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class StepEvent:
    """One step of a decoder, as seen from outside: `next()` was called, and returned `output`."""

    start_s: float
    end_s: float
    output: StepOutput

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Trace:
    """One arm over one block of requests, on a clock that starts at an arbitrary point.

    `start_s` is when the first step was asked for, `end_s` when the generator was exhausted.
    """

    arm: str
    repeat: int
    block: int
    start_s: float = 0.0
    end_s: float = 0.0
    steps: list[StepEvent] = field(default_factory=list)
    passes: list[PassEvent] = field(default_factory=list)
    proposals: list[ProposalEvent] = field(default_factory=list)


@dataclass(frozen=True)
class RequestTimeline:
    """One request of a trace: admitted at `admitted_s`, then commits of 1 or more tokens as the host learned them.

    `block` numbers the requests that were decoded together, whose times are one another's; None: decoded alone.
    """

    request_id: int
    repeat: int
    queued_s: float
    admitted_s: float
    commit_times_s: tuple[float, ...]
    commit_sizes: tuple[int, ...]
    token_ids: tuple[int, ...]
    block: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.commit_sizes)


def timelines(trace: Trace) -> list[RequestTimeline]:
    """The requests of a trace, in order of admission."""
    steps: dict[int, list[tuple[StepEvent, int]]] = {}
    for step in trace.steps:
        for index, request_id in enumerate(step.output.request_ids):
            steps.setdefault(request_id, []).append((step, index))
    return [_timeline(trace, request_id, found) for request_id, found in steps.items()]


def _timeline(trace: Trace, request_id: int, found: list[tuple[StepEvent, int]]) -> RequestTimeline:
    commits = [step.output.committed[index] for step, index in found]
    admitted_s = found[0][0].start_s
    return RequestTimeline(
        request_id=request_id,
        repeat=trace.repeat,
        queued_s=admitted_s - trace.start_s,
        admitted_s=admitted_s,
        commit_times_s=tuple(step.end_s for step, _ in found),
        commit_sizes=tuple(map(len, commits)),
        token_ids=tuple(token for commit in commits for token in commit),
        block=trace.block,
    )


def answers_of(traces: Iterable[Trace]) -> dict[int, tuple[int, ...]]:
    """The new tokens of each request, as an arm wrote them first."""
    found: dict[int, tuple[int, ...]] = {}
    for trace in sorted(traces, key=lambda trace: trace.repeat):
        for timeline in timelines(trace):
            found.setdefault(timeline.request_id, timeline.token_ids)
    return found


def as_rows(traces: Iterable[Trace]) -> Iterable[dict[str, Any]]:
    """The events as flat JSON-able rows."""
    for trace in traces:
        where = {"arm": trace.arm, "repeat": trace.repeat, "block": trace.block}
        yield {**where, "event": "block", "start_s": trace.start_s, "end_s": trace.end_s}
        for step in trace.steps:
            yield {
                **where,
                "event": "step",
                "start_s": step.start_s,
                "end_s": step.end_s,
                **asdict(step.output),
            }
        for event in trace.passes:
            yield {**where, "event": "pass", **asdict(event)}
        for proposal in trace.proposals:
            yield {**where, "event": "proposal", **asdict(proposal)}
