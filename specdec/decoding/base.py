"""The one decoding loop: prefill whoever is new, step all others, retire the finished.

A decoding method says how a step produces tokens; it owns no clock, logger or tokenizer. Measurement times
`next()` on the generator from outside: the first output of a request is its prefill plus first token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from specdec.draft_length.base import DraftLength
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws, Draws
from specdec.progress import Progress, Row, StopRule, Vacancy
from specdec.runner import Runner
from specdec.sampling import Sampler
from specdec.types import Phase, Request, StepOutput
from specdec.verifiers.base import Verifier


@dataclass(frozen=True)
class DecodingParts:
    """What a decoder is assembled from; the last three are there for methods that declare `uses_drafter`."""

    runner: Runner
    sampler: Sampler
    draws: Draws
    stop_rule: StopRule
    num_slots: int
    drafter: Drafter | None = None
    verifier: Verifier | None = None
    draft_length: DraftLength | None = None


@dataclass
class DecodingOptions(ABC):
    """Options of a decoding method: plain typed fields with defaults, checked in `__post_init__`."""

    uses_drafter: ClassVar[bool] = False

    @abstractmethod
    def build(self, parts: DecodingParts) -> Decoder: ...


class Decoder(ABC):
    """Produces the answers to requests over the slots of one target runner."""

    def __init__(self, parts: DecodingParts) -> None:
        self.runner = parts.runner
        self.sampler = parts.sampler
        self.draws = parts.draws
        self.stop_rule = parts.stop_rule
        self.num_slots = parts.num_slots

    def generate(self, requests: Sequence[Request]) -> Iterator[StepOutput]:
        """One output per step. More requests than slots wait, and take slots as they become free."""
        progress = Progress(requests, self.num_slots, self.stop_rule)
        try:
            while progress.unfinished:
                admitted = progress.admit()
                yield self._prefill(progress, admitted) if admitted else self.step(progress)
                for vacancy in progress.retire():
                    self.vacate(vacancy)
        finally:  # also when the caller stops early
            for row in progress.rows:
                self.vacate(Vacancy(row.slot))

    @abstractmethod
    def step(self, progress: Progress) -> StepOutput:
        """Produce and commit the next token or tokens of every active row."""

    def vacate(self, vacancy: Vacancy) -> None:
        """A row is finished: its slot is empty, or goes to the row in the replacement slot."""
        self.runner.release(vacancy.slot)
        if vacancy.replacement is not None:
            self.runner.move(vacancy.replacement, vacancy.slot)

    def block_draws(self, rows: Sequence[Row], shares_noise: bool = False) -> BlockDraws:
        """Draws for the tokens that follow each row's text."""
        request_ids = [row.request.request_id for row in rows]
        starts = [len(row.token_ids) for row in rows]
        return BlockDraws.of(self.draws, request_ids, starts, self.runner.device, shares_noise)

    def next_tokens(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[list[int]]:
        """The target's own next token of each row, from `logits [B, V]`."""
        offsets = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
        token_ids = self.block_draws(rows).target(self.sampler.law(logits, rows), offsets)
        return [[token] for token in token_ids.tolist()]

    def newest_tokens(self, rows: Sequence[Row]) -> torch.Tensor:
        """The one token of each row that the cache does not hold yet, `[B, 1]`."""
        return torch.tensor([[row.token_ids[-1]] for row in rows], device=self.runner.device)

    def _prefill(self, progress: Progress, admitted: Sequence[Row]) -> StepOutput:
        logits = self.runner.prefill([row.token_ids for row in admitted], [row.slot for row in admitted])
        return progress.commit(Phase.PREFILL, admitted, self.next_tokens(logits, admitted))
