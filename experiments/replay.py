"""Replay a committed text without a drafter: what does the target say at each position?

Once in single tokens, and once with the pass boundaries that a speculative run had. If the two disagree at a
position, the shape of the pass alone decides there, and neither the drafter nor a rollback is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from experiments.trace import Trace
from specdec.decoding.base import DecodingParts
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws
from specdec.progress import Row
from specdec.types import DraftProposal, GoOn, Law, Request, Verification

Position = tuple[int, int]  # (request id, index of the new token)
# Stands for the draft tokens that were rejected: they are part of the pass's shape, not of the text.
FILLER_ID = 0


@dataclass(frozen=True)
class PlannedPass:
    """One pass over one row: its draft tokens, and how many of them the text kept."""

    drafted: int
    accepted: int


Plan = Mapping[int, Sequence[PlannedPass]]


def recorded_plan(trace: Trace) -> Plan:
    """The pass boundaries of a speculative trace, per request."""
    verify_passes = iter([event for event in trace.passes if event.phase == "verify"])
    plan: dict[int, list[PlannedPass]] = {}
    for step in trace.steps:
        if step.output.phase != "verify":
            continue
        counts = next(verify_passes).counts
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
) -> dict[Position, int]:
    """The target's greedy token at each wanted position of the texts `answers`, as far as it was reached.

    `parts` are a fresh runner's; drafter, verifier and draft length are replaced. Positions of a first token are
    never reached: it comes from the prefill.
    """
    script = _Script(answers, plan, parts.runner.device)
    decoder = SpeculativeDecoder(
        replace(
            parts,
            drafter=script,
            verifier=script,
            # never binding: the script itself says how many draft tokens a pass has
            draft_length=FixedDraftLength(max((p.drafted for ps in plan.values() for p in ps), default=0)),
        )
    )
    for _ in decoder.generate(block):
        if all(position in script.said for position in wanted):
            break
    return {position: script.said[position] for position in wanted if position in script.said}


class _Script(Drafter):
    """Drafter and verifier in one: proposes the text itself, keeps what the plan kept, notes the target's tokens."""

    def __init__(self, answers: Mapping[int, Sequence[int]], plan: Plan, device: torch.device) -> None:
        self.said: dict[Position, int] = {}
        self._answers = answers
        self._plan = {request_id: iter(passes) for request_id, passes in plan.items()}
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
        tokens = target.ids.tolist()
        next_ids = []
        for (request_id, index, planned), row in zip(self._now, tokens, strict=True):
            for offset in range(planned.accepted + 1):
                self.said[(request_id, index + offset)] = row[offset]
            next_ids.append(self._answers[request_id][index + planned.accepted])
        return Verification(tuple(planned.accepted for _, _, planned in self._now), tuple(next_ids))

    def _place(self, row: Row) -> tuple[int, int, PlannedPass]:
        request_id = row.request.request_id
        index = len(row.token_ids) - len(row.request.prompt_ids)
        return request_id, index, next(self._plan[request_id])
