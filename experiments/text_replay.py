"""Replay a committed text without a drafter: the target's logits at chosen positions.

Once in single tokens, once with the pass boundaries that a speculative run had, once in a single pass. Only the
second of them rolls anything back, so a fault of a rollback shows in it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.trace import Trace
from specdec.decoding.base import DecodingParts
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws
from specdec.progress import Row
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Law, Request, Verification
from specdec.verifiers.base import Verifier

Position = tuple[int, int]  # (request id, index of the new token)
# Stands for the draft tokens that were rejected: they are part of the pass's shape, not of the text.
FILLER_ID = 0
STEP_PHASES = ("decode", "verify")


@dataclass(frozen=True)
class PlannedPass:
    """One pass over one row: its draft tokens, and how many of them the text kept."""

    drafted: int
    accepted: int


Plan = Mapping[int, Sequence[PlannedPass]]


def recorded_plan(trace: Trace) -> Plan:
    """The pass boundaries of a speculative trace, per request; a step that drafted nothing is a decode pass."""
    passes = iter([event for event in trace.passes if event.phase in STEP_PHASES])
    plan: dict[int, list[PlannedPass]] = {}
    for step in trace.steps:
        if step.output.phase not in STEP_PHASES:
            continue
        counts = next(passes).counts
        for request_id, count, accepted in zip(
            step.output.request_ids, counts, step.output.accepted, strict=True
        ):
            plan.setdefault(request_id, []).append(PlannedPass(count - 1, accepted))
    return plan


def single_token_plan(answers: Mapping[int, Sequence[int]]) -> Plan:
    """The boundaries of plain decoding: one token per pass."""
    return {request_id: [PlannedPass(0, 0)] * (len(answer) - 1) for request_id, answer in answers.items()}


def replay(
    parts: DecodingParts,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    plan: Plan,
    wanted: Sequence[Position],
) -> dict[Position, Tensor]:
    """The target's logits `[V]`, float64, at each wanted position of the texts `answers`, as far as reached.

    `parts` are a fresh runner's; drafter, verifier and draft length are replaced. Positions of a first token are
    never reached: it comes from the prefill.
    """
    sampler = _KeepingSampler(parts.sampler)
    script = _Script(answers, plan, sampler, wanted, parts.runner.device)
    decoder = SpeculativeDecoder(
        replace(
            parts,
            sampler=sampler,
            drafter=script,
            verifier=script,
            # never binding: the script itself says how many draft tokens a pass has
            draft_length=FixedDraftLength(max((p.drafted for ps in plan.values() for p in ps), default=0)),
        )
    )
    for _ in decoder.generate(block):
        if len(script.found) == len(set(wanted)):
            break
    return script.found


def read_at_once(
    parts: DecodingParts,
    block: Sequence[Request],
    answers: Mapping[int, Sequence[int]],
    wanted: Sequence[Position],
) -> dict[Position, Tensor]:
    """The target's logits `[V]`, float64, at each wanted position, the whole text before it read in one pass."""
    requests = {request.request_id: request for request in block}
    found = {}
    for request_id, index in wanted:
        row = Row(requests[request_id], 0)
        row.token_ids.extend(answers[request_id][:index])
        logits = parts.runner.prefill([row.token_ids], [0])
        found[(request_id, index)] = parts.sampler.scores(logits, [row])[0].double()
        parts.runner.release(0)
    return found


class _KeepingSampler(Sampler):
    """Another sampler that keeps the logits of the latest pass, penalties and bans included."""

    def __init__(self, sampler: Sampler) -> None:
        vars(self).update(vars(sampler))

    def scores(self, logits: Tensor, rows: Sequence[Row], drafts: Tensor | None = None) -> Tensor:
        self.logits = super().scores(logits, rows, drafts)
        return self.logits


class _Script(Drafter, Verifier):
    """Drafter and verifier in one: proposes the text itself, keeps what the plan kept, notes the target's logits."""

    def __init__(
        self,
        answers: Mapping[int, Sequence[int]],
        plan: Plan,
        sampler: _KeepingSampler,
        wanted: Sequence[Position],
        device: torch.device,
    ) -> None:
        self.found: dict[Position, Tensor] = {}
        self._answers = answers
        self._plan = {request_id: iter(passes) for request_id, passes in plan.items()}
        self._sampler = sampler
        self._wanted = set(wanted)
        self._device = device
        self._now: list[tuple[int, int, PlannedPass]] = []

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        self._now = [self._place(row) for row in rows]
        drafts = []
        for request_id, index, planned in self._now:
            kept = list(self._answers[request_id][index : index + planned.accepted])
            drafts.append(kept + [FILLER_ID] * (planned.drafted - len(kept)))
        return DraftProposal.certain(drafts, self._device)

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        if target.ids is None:
            raise ValueError("replay is for greedy decoding")
        next_ids = []
        for (request_id, index, planned), row in zip(self._now, self._sampler.logits, strict=True):
            for offset in range(planned.accepted + 1):
                if (request_id, index + offset) in self._wanted:
                    self.found[(request_id, index + offset)] = row[offset].double()
            next_ids.append(self._answers[request_id][index + planned.accepted])
        return Verification(tuple(planned.accepted for _, _, planned in self._now), tuple(next_ids))

    def _place(self, row: Row) -> tuple[int, int, PlannedPass]:
        request_id = row.request.request_id
        index = len(row.token_ids) - len(row.request.prompt_ids)
        return request_id, index, next(self._plan[request_id])
