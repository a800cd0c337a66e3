"""Speculative decoding: propose, verify, accept, roll back (Leviathan et al. 2023; Chen et al. 2023).

The loop knows neither how drafts are made (drafter), nor how many (draft length), nor how they are judged
(verifier). Rows accept different numbers; nothing is re-aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from specdec.decoding.base import Decoder, DecodingOptions, DecodingParts
from specdec.progress import Progress, Row, Vacancy
from specdec.types import DraftProposal, Phase, StepOutput


class SpeculativeDecoder(Decoder):
    """Each step verifies up to K draft tokens per row in one pass and commits 1 to K + 1 tokens."""

    def __init__(self, parts: DecodingParts) -> None:
        super().__init__(parts)
        if parts.drafter is None or parts.verifier is None or parts.draft_length is None:
            raise ValueError("speculative decoding needs a drafter, a verifier and a draft length")
        self.drafter = parts.drafter
        self.verifier = parts.verifier
        self.draft_length = parts.draft_length

    def step(self, progress: Progress) -> StepOutput:
        rows = progress.rows
        draws = self.block_draws(rows, self.verifier.shares_noise)
        # 1. Propose.
        proposal = self.drafter.propose(rows, self._limits(rows), self.draft_length.go_on, draws)
        if not any(proposal.lengths):
            proposal = DraftProposal.nothing(len(rows), self.runner.device)
        # 2. Verify: the target's laws behind the newest token and behind every draft token, in one pass.
        logits = self._read(rows, proposal)
        # 3. Accept: the longest prefix the verifier lets stand, and one token more.
        target = self.sampler.law(logits, rows, proposal.token_ids)
        verification = self.verifier.verify(proposal, target, draws)
        # 4. Roll back what was rejected, in the target's cache and the drafter's.
        self.runner.commit(
            [len(row.token_ids) + kept for row, kept in zip(rows, verification.accepted, strict=True)]
        )
        self.drafter.accept(rows, verification)
        self.draft_length.accept(rows, proposal.lengths, verification.accepted)
        committed = _committed(proposal, verification.accepted, verification.next_ids)
        phase = Phase.VERIFY if any(proposal.lengths) else Phase.DECODE
        return progress.commit(phase, rows, committed, drafted=proposal.lengths)

    def _read(self, rows: Sequence[Row], proposal: DraftProposal) -> torch.Tensor:
        """The target's logits `[B, K + 1, V]` behind the newest token and the draft tokens."""
        newest = self.newest_tokens(rows)
        if not any(proposal.lengths):  # plain decoding
            return self.runner.decode(newest).unsqueeze(1)
        tokens = torch.cat([newest, proposal.token_ids], 1)
        return self.runner.verify(tokens, [1 + length for length in proposal.lengths])

    def vacate(self, vacancy: Vacancy) -> None:
        super().vacate(vacancy)
        self.drafter.vacate(vacancy)

    def _limits(self, rows: Sequence[Row]) -> list[int]:
        # A step commits one token more than it accepts, so drafting the last allowed token is of no use; this
        # also keeps every draft position within the row's capacity.
        wanted = self.draft_length.limits(rows, self.drafter.prospects(rows))
        return [min(limit, row.remaining - 1) for limit, row in zip(wanted, rows, strict=True)]


def _committed(proposal: DraftProposal, accepted: Sequence[int], next_ids: Sequence[int]) -> list[list[int]]:
    drafts = proposal.token_ids.tolist()
    return [[*draft[:kept], token] for draft, kept, token in zip(drafts, accepted, next_ids, strict=True)]


@dataclass
class SpeculativeOptions(DecodingOptions):
    """Has no options of its own: the groups drafter, verifier and draft_length say the rest."""

    uses_drafter: ClassVar[bool] = True

    def build(self, parts: DecodingParts) -> SpeculativeDecoder:
        return SpeculativeDecoder(parts)
