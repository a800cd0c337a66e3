"""Decoding, step by step, as the strategy does it: what each step took, and how many tokens it brought."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.articles.lab import Lab, limits
from experiments.articles.timing import Clock, Timing
from experiments.measure import no_garbage_collection
from specdec.decoding.base import Decoder
from specdec.types import Phase, Request

# Steps behind the prefill that are not counted: kernels prepare themselves.
SETTLING_STEPS = 2


@dataclass(frozen=True)
class Step:
    """One output of a decoder: how long it took, its phase, and the tokens each of its rows wrote."""

    ms: float
    phase: Phase
    committed: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.committed)


@dataclass(frozen=True)
class DecodedSteps:
    """All steps of a batch that was decoded together."""

    steps: Sequence[Step]
    rows: int

    @property
    def prefill_ms(self) -> float:
        return sum(step.ms for step in self.steps if step.phase == Phase.PREFILL)

    @property
    def settled(self) -> list[Step]:
        """Steps behind the prefill in which all rows wrote, without the first few."""
        full = [
            step for step in self.steps if step.phase != Phase.PREFILL and len(step.committed) == self.rows
        ]
        return full[SETTLING_STEPS:] or full

    @property
    def timing(self) -> Timing:
        """Of a step; the first one behind the prefill apart."""
        later = [step.ms for step in self.steps if step.phase != Phase.PREFILL]
        return Timing.of([step.ms for step in self.settled], first_ms=later[0])

    @property
    def tok_s(self) -> float:
        """Tokens of all rows per second of step time."""
        return 1e3 * sum(step.num_tokens for step in self.settled) / sum(step.ms for step in self.settled)


def decode_steps(lab: Lab, rows: int, prompt_tokens: int, new_tokens: int) -> DecodedSteps:
    """Real texts, `prompt_tokens` of each, decoded together by the strategy, whatever they say. Raises LimitError."""
    requests = lab.real_requests(rows, prompt_tokens, new_tokens)
    decoder = lab.decoder(rows, prompt_tokens + new_tokens)
    with limits():
        return DecodedSteps(timed_steps(decoder, requests), rows)


def timed_steps(
    decoder: Decoder, requests: Sequence[Request], clock: Clock = time.perf_counter
) -> list[Step]:
    """Every step of a decoder, timed from outside as `experiments.measure` does."""
    found = []
    with no_garbage_collection():
        start_s = clock()
        for output in decoder.generate(requests):
            end_s = clock()
            committed = tuple(len(tokens) for tokens in output.committed)
            found.append(Step(1e3 * (end_s - start_s), output.phase, committed))
            start_s = clock()
    return found
