"""Decoding, step by step, as the strategy does it: what each step took, and how many tokens it brought."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.articles.lab import Lab, limits
from experiments.articles.timing import LEAST_SAMPLES, Clock, Timing
from experiments.measure import no_garbage_collection, record_steps
from experiments.recorder import Recorder
from experiments.trace import StepEvent
from specdec.decoding.base import Decoder
from specdec.types import Phase, Request

# Steps behind the prefill that are not counted: kernels prepare themselves.
SETTLING_STEPS = 2


@dataclass(frozen=True)
class Step:
    """One output of a decoder: how long it took, its phase, and the tokens each of its rows wrote.

    `is_cut`: a row had more tokens than its limit let it write.
    """

    ms: float
    phase: Phase
    committed: tuple[int, ...]
    is_cut: bool = False

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
        """Steps behind the prefill in which all rows wrote what they could, without the first few.

        Of rows that accept different numbers of drafts one is done first: what comes after that is of a smaller batch,
        and a step that the limit cut wrote less than it took the time for.
        """
        full = [
            step for step in self.steps if step.phase != Phase.PREFILL and len(step.committed) == self.rows
        ]
        whole = [step for step in full if not step.is_cut] or full
        return whole[SETTLING_STEPS:] or whole

    @property
    def timing(self) -> Timing:
        """Of a step; the first one behind the prefill apart."""
        later = [step.ms for step in self.steps if step.phase != Phase.PREFILL]
        return Timing.of([step.ms for step in self.settled], first_ms=later[0])

    @property
    def tok_s(self) -> float:
        """Tokens of all rows per second of step time."""
        return 1e3 * sum(step.num_tokens for step in self.settled) / sum(step.ms for step in self.settled)


def few_steps_notes(found: Mapping[int, DecodedSteps]) -> list[str]:
    """Batches with few steps, as where a strategy writes many tokens in one."""
    few = [str(batch) for batch, steps in found.items() if len(steps.settled) < LEAST_SAMPLES]
    if not few:
        return []
    return [f"fewer than {LEAST_SAMPLES} steps counted at {', '.join(few)}: raise experiment.new_tokens"]


def decode_steps(lab: Lab, rows: int, prompt_tokens: int, new_tokens: int) -> DecodedSteps:
    """Real texts, `prompt_tokens` of each, decoded together by the strategy, whatever they say. Raises LimitError."""
    requests = lab.real_requests(rows, prompt_tokens, new_tokens)
    decoder = lab.decoder(rows, prompt_tokens + new_tokens)
    with limits():
        return DecodedSteps(timed_steps(decoder, requests), rows)


def timed_steps(
    decoder: Decoder, requests: Sequence[Request], clock: Clock = time.perf_counter
) -> list[Step]:
    """Every step of a decoder, as `experiments.measure` times them."""
    recorder = Recorder(clock)
    with no_garbage_collection():
        span_s = record_steps(decoder, requests, recorder)
    return [_step(event) for event in recorder.trace("", 0, 0, *span_s).steps]


def _step(event: StepEvent) -> Step:
    output = event.output
    committed = tuple(len(tokens) for tokens in output.committed)
    return Step(1e3 * event.duration_s, output.phase, committed, any(output.cut))
