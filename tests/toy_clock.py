"""A clock that only moves when a simulated pass moves it, and a runner whose passes take known times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from toy_engine import LawOf, ToyRunner

# Binary fractions of a second: sums of them are exact.
PREFILL_S_PER_TOKEN = 1 / 16
DECODE_S = 1.0
VERIFY_S = 1.25
OVERHEAD_S = 1 / 64


class Clock:
    """Seconds since the start of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedRunner(ToyRunner):
    """Hand-written laws; each verb takes the time above times `scale`, each commit `OVERHEAD_S`."""

    def __init__(
        self, law_of: LawOf, vocab_size: int, num_slots: int, clock: Clock, scale: float = 1.0
    ) -> None:
        super().__init__(law_of, vocab_size, num_slots)
        self.clock = clock
        self.scale = scale

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        self.clock.now += self.scale * PREFILL_S_PER_TOKEN * sum(map(len, prompts))
        return super().prefill(prompts, slots)

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        self.clock.now += self.scale * DECODE_S
        return super().decode(token_ids, counts)

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        self.clock.now += self.scale * VERIFY_S
        return super().verify(token_ids, counts)

    def commit(self, lengths: Sequence[int]) -> None:
        self.clock.now += OVERHEAD_S
        super().commit(lengths)


def spans(events: Sequence[Any]) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in events]
