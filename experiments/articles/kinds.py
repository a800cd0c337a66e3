"""Kinds of passes, timed: each knows what it moves and computes, and so its place under the roof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from experiments.articles.lab import Lab, limits
from experiments.articles.timing import Timing
from experiments.roofline import Ceilings, ModelCost, RooflinePoint, mbu_frac, mfu_frac, point
from experiments.theory import PassCost, arithmetic_intensity, cost_of
from experiments.trace import PassEvent

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"


@dataclass(frozen=True)
class Kind:
    """A pass over `tokens` of each of `rows` rows behind `context` tokens; of a prompt, behind none."""

    phase: str
    label: str
    rows: int
    tokens: int
    context: int

    def __str__(self) -> str:
        return f"{self.phase}, {self.label}"


@dataclass(frozen=True)
class MeasuredKind:
    """A pass of some kind that took as long as its event says, and what such passes cost."""

    kind: Kind
    event: PassEvent
    cost: ModelCost
    ceilings: Ceilings

    @property
    def ms(self) -> float:
        return 1e3 * self.event.duration_s

    @property
    def point(self) -> RooflinePoint:
        found = point(self.kind.label, [self.event], self.cost)
        assert found is not None  # it took time
        return found

    @property
    def mbu_frac(self) -> float:
        return mbu_frac([self.event], self.cost, self.ceilings) or 0.0

    @property
    def mfu_frac(self) -> float:
        return mfu_frac([self.event], self.cost, self.ceilings) or 0.0

    @property
    def theory(self) -> PassCost:
        return cost_of(self.event, self.cost, self.ceilings)

    @property
    def articles_intensity(self) -> float:
        """Operations per byte by the weights alone: two for each weight and token, so 1 for a token in 16 bits."""
        weights = self.cost.body_parameters + self.cost.head_parameters
        return arithmetic_intensity(self.kind.rows * self.kind.tokens, self.cost.weights_read_bytes / weights)

    def taking(self, ms: float) -> MeasuredKind:
        """The same pass, had it taken so long."""
        return replace(self, event=replace(self.event, start_s=0.0, end_s=ms / 1e3))


def measure_kind(lab: Lab, kind: Kind) -> tuple[MeasuredKind, Timing]:
    """Its median, and all of its timing. Raises LimitError."""
    timing = lab.one_pass(kind.rows, kind.tokens, kind.context) if kind.context else lab.prefill(kind.tokens)
    event = lab.event(kind.rows, kind.tokens, kind.context, end_s=timing.median_ms / 1e3)
    return MeasuredKind(kind, event, lab.cost_at(kind.context + kind.tokens), lab.ceilings), timing


def again_and_again(lab: Lab, kind: Kind) -> Callable[[], None]:
    """What runs such a decode step or prefill once more and leaves its cache as it was. Raises LimitError."""
    if kind.phase == PREFILL:
        reader, prompt = lab.runner(1, kind.tokens), lab.random_ids(kind.tokens)

        def read() -> None:
            with limits():
                reader.prefill([prompt], [0])
            reader.release(0)

        return read
    runner = lab.filled(kind.rows, kind.context, 1)
    lengths = runner.lengths
    ids = torch.tensor([lab.random_ids(1, row) for row in range(kind.rows)], device=lab.device)

    def write() -> None:
        with limits():
            runner.decode(ids)
        runner.commit(lengths)

    return write
