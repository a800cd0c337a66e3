"""A draft token stands where it is the token that the target itself samples: output equal to the baseline's.

Target and drafter draw with the same noise: Gumbel-max with a key of (request, position), so that plain sampling is
a function of the seed and the text, and a draft model close to the target mostly picks the same token. The output is
token for token what plain decoding samples for that seed, for any drafter, draft length and batch. (For a coupling of
two Gumbel-max samples see Daliri, Musco, Suresh 2024, arXiv 2408.07978.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specdec.draws import BlockDraws
from specdec.types import DraftProposal, Law, Verification
from specdec.verifiers.base import Verifier, VerifierOptions


class MatchVerifier(Verifier):
    """Reads no draft law: a draft token is right or wrong, whatever it was drawn from."""

    shares_noise: ClassVar[bool] = True

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        lengths = torch.tensor(proposal.lengths, device=proposal.token_ids.device)
        standing = torch.ones(lengths.shape, dtype=torch.bool, device=lengths.device)
        accepted, next_ids = torch.zeros_like(lengths), torch.zeros_like(lengths)
        for offset in range(proposal.token_ids.shape[1] + 1):
            sampled = draws.target(target.at(offset), torch.full_like(lengths, offset))
            next_ids = torch.where(standing, sampled, next_ids)
            if offset == proposal.token_ids.shape[1]:
                break
            standing = standing & (offset < lengths) & (sampled == proposal.token_ids[:, offset])
            accepted = accepted + standing
            if not standing.any():
                break
        return Verification(tuple(accepted.tolist()), tuple(next_ids.tolist()))


@dataclass
class MatchOptions(VerifierOptions):
    """Has no options."""

    lossless: ClassVar[bool] = True

    def build(self) -> MatchVerifier:
        return MatchVerifier()
