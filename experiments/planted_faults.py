"""Faults that public implementations had, planted: a certificate is worth what it catches of them.

Each changes the output's law by well over a thousandth on the certificate's own cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws, Draws, Keys, Purpose
from specdec.progress import Row, Vacancy
from specdec.types import DraftProposal, GoOn, Law, Verification
from specdec.verifiers.base import Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.token import TokenVerifier


@dataclass(frozen=True)
class Fault:
    """What is wrong: the verifier, or what wraps a right drafter (`drafter`), or both are right and absent."""

    verifier: Verifier
    drafter: type[Drafter] | None = None


class _WrongResidual(TokenVerifier):
    """After a rejection draws from the target instead of from what the draft left of it."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        found = super().verify(proposal, target, draws)
        accepted = torch.tensor(found.accepted)
        next_ids = draws.recovered(target.take(accepted), accepted)
        return Verification(found.accepted, tuple(next_ids.tolist()))


class _SharedUniformDraws(BlockDraws):
    def recovered(self, law: Law, offsets: Tensor) -> Tensor:
        return self.draws.pick(law, Keys(Purpose.ACCEPT, self.request_ids, self.starts, offsets))


class _SharedUniform(TokenVerifier):
    """Draws the recovered token with the very number that rejected the draft token."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        return super().verify(
            proposal, target, _SharedUniformDraws(draws.draws, draws.request_ids, draws.starts)
        )


class _StopsEarly(BlockVerifier):
    """The block rule as if it were the token rule: ends at the first prefix that does not stand."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        return super().verify(proposal, target, replace(draws, draws=_StickyNo(draws.draws)))


class _StickyNo:
    """Answers no after the first no, row by row."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._standing: Tensor | None = None

    def accept(self, prob: Tensor, keys: Keys) -> Tensor:
        answer = self._draws.accept(prob, keys)
        self._standing = answer if self._standing is None else self._standing & answer
        return self._standing

    def pick(self, law: Law, keys: Keys) -> Tensor:
        return self._draws.pick(law, keys)


class _KeyedByOffsetAlone(BlockVerifier):
    """Each block decides with the same numbers again."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        return super().verify(proposal, target, replace(draws, starts=torch.zeros_like(draws.starts)))


class _Wrapper(Drafter):
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self._drafter.accept(rows, verification)

    def vacate(self, vacancy: Vacancy) -> None:
        self._drafter.vacate(vacancy)


class _LikeliestDraws(BlockDraws):
    def draft(self, law: Law, offset: int) -> Tensor:
        assert law.probs is not None
        return law.probs.argmax(-1)


class _ArgmaxDraft(_Wrapper):
    """Drafts the likeliest token and reports the soft law."""

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        likeliest = _LikeliestDraws(draws.draws, draws.request_ids, draws.starts)
        return self._drafter.propose(rows, limits, go_on, likeliest)


class _DropsUnlikely(_Wrapper):
    """Ends the draft at a drawn token because of its low probability: what remains was not drawn from the law."""

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        proposal = self._drafter.propose(rows, limits, go_on, draws)
        lengths = []
        for row, length in enumerate(proposal.lengths):
            likely = [
                float(proposal.laws.at(offset).prob(proposal.token_ids[:, offset])[row]) > 0.45
                for offset in range(length)
            ]
            lengths.append(likely.index(False) if False in likely else length)
        return replace(proposal, lengths=tuple(lengths))


FAULTS: dict[str, Fault] = {
    "wrong_residual": Fault(_WrongResidual()),
    "shared_uniform": Fault(_SharedUniform()),
    "argmax_draft_with_soft_law": Fault(TokenVerifier(), _ArgmaxDraft),
    "block_rule_stopping_early": Fault(_StopsEarly()),
    "draws_reused_across_blocks": Fault(_KeyedByOffsetAlone()),
    "low_probability_token_dropped": Fault(TokenVerifier(), _DropsUnlikely),
}
