"""What a verifier is: a pure function of the proposal, the target's laws and keyed draws. One file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from specdec.draws import BlockDraws
from specdec.types import DraftProposal, Law, Verification


class Verifier(ABC):
    """Decides how much of each row's draft stands. No model, no cache, no uniforms of its own.

    `shares_noise`: drafts are to be drawn with the noise of the target's own samples, so that they often coincide.
    """

    shares_noise: ClassVar[bool] = False

    @abstractmethod
    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        """`target` are laws `[B, K + 1]`: behind the newest token, and behind each draft token."""


@dataclass
class VerifierOptions(ABC):
    """Options of a verifier: plain typed fields with defaults, checked in `__post_init__`.

    `lossless` declares that its output law is the target's.
    """

    lossless: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Verifier: ...
