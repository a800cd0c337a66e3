"""Token-wise rejection sampling: each draft token stands with probability min(1, target / draft).

Sources: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.draws import BlockDraws
from specdec.types import DraftProposal, Law, Verification
from specdec.verifiers.base import Verifier, VerifierOptions


class TokenVerifier(Verifier):
    """The output law is exactly the target's; greedy is the case of one-hot laws."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        device = proposal.token_ids.device
        lengths = torch.tensor(proposal.lengths, device=device)
        accepted = self._accepted(proposal, lengths, target, draws)
        rejected = accepted < lengths
        behind = target.take(accepted)
        next_ids = draws.target(behind, accepted)
        if rejected.any():
            # Where nothing was rejected the offset may lie behind the draft: any law does, the draw is not used.
            draft = proposal.laws.take(accepted.clamp_max(proposal.token_ids.shape[1] - 1))
            next_ids = torch.where(rejected, draws.recovered(behind.residual(draft), accepted), next_ids)
        return Verification(tuple(accepted.tolist()), tuple(next_ids.tolist()))

    def _accepted(self, proposal: DraftProposal, lengths: Tensor, target: Law, draws: BlockDraws) -> Tensor:
        standing = lengths > 0
        accepted = torch.zeros_like(lengths)
        for offset in range(proposal.token_ids.shape[1]):
            token_ids = proposal.token_ids[:, offset]
            ratio = target.at(offset).prob(token_ids) / proposal.laws.at(offset).prob(token_ids)
            standing = standing & (offset < lengths) & draws.accept(ratio, offset)
            accepted = accepted + standing
        return accepted


@dataclass
class TokenOptions(VerifierOptions):
    """Has no options."""

    lossless: ClassVar[bool] = True

    def build(self) -> TokenVerifier:
        return TokenVerifier()
