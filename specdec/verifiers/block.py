"""Block verification: whole prefixes of the draft are judged together, and more tokens stand than token by token.

Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2. Rows may
have drafted different numbers: each row's block ends at its own last draft token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.draws import BlockDraws
from specdec.types import DraftProposal, Law, Verification
from specdec.verifiers.base import Verifier, VerifierOptions


class BlockVerifier(Verifier):
    """The output law is exactly the target's; never fewer tokens stand, in expectation, than token by token."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        lengths = torch.tensor(proposal.lengths, device=proposal.token_ids.device)
        accepted = torch.zeros_like(lengths)
        standing = torch.ones(lengths.shape, dtype=torch.float64, device=lengths.device)  # p_i of the paper
        scale = standing  # that of the longest prefix that stands
        for number in range(1, proposal.token_ids.shape[1] + 1):
            drafted = number <= lengths
            standing = torch.where(drafted, self._extended(standing, proposal, target, number - 1), standing)
            stands = drafted & draws.accept(
                self._chance(standing, proposal, target, number, lengths), number - 1
            )
            accepted = torch.where(stands, number, accepted)
            scale = torch.where(stands, standing, scale)
        rejected = accepted < lengths
        behind = target.take(accepted)
        next_ids = draws.target(behind, accepted)
        if rejected.any():
            # Where nothing was rejected the offset may lie behind the draft: any law does, the draw is not used.
            draft = proposal.laws.take(accepted.clamp_max(proposal.token_ids.shape[1] - 1))
            recovered = draws.recovered(behind.residual(draft, scale), accepted)
            next_ids = torch.where(rejected, recovered, next_ids)
        return Verification(tuple(accepted.tolist()), tuple(next_ids.tolist()))

    def _extended(self, standing: Tensor, proposal: DraftProposal, target: Law, offset: int) -> Tensor:
        """How likely the prefix that ends with the draft token at `offset` is under the target, at most 1."""
        token_ids = proposal.token_ids[:, offset]
        ratio = target.at(offset).prob(token_ids) / proposal.laws.at(offset).prob(token_ids)
        return (standing * ratio).clamp_max(1.0)

    def _chance(
        self, standing: Tensor, proposal: DraftProposal, target: Law, number: int, lengths: Tensor
    ) -> Tensor:
        """With which probability the first `number` draft tokens stand (h_i of the paper)."""
        if number == proposal.token_ids.shape[1]:
            return standing
        excess = target.at(number).excess(proposal.laws.at(number), standing)
        total = excess + 1 - standing
        # Where both laws are equal and the prefix is certain, nothing is left that could be drawn instead.
        chance = torch.where(total > 0, excess / total, 1.0)
        return torch.where(lengths == number, standing, chance)


@dataclass
class BlockOptions(VerifierOptions):
    """Has no options."""

    lossless: ClassVar[bool] = True

    def build(self) -> BlockVerifier:
        return BlockVerifier()
