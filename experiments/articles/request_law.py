"""What a request will take by its shape, from what reading and steps were measured to take by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments import theory
from experiments.articles.timing import Timing
from experiments.theory import PrefillCurve, RequestTime

# A prefill is fitted to so many lengths: one for each of its parts, fixed, linear and quadratic.
LEAST_LENGTHS = 3


@dataclass(frozen=True)
class Shape:
    """A request by its lengths."""

    name: str
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.name} ({self.prompt_tokens:,} in, {self.new_tokens:,} out)"


@dataclass(frozen=True)
class RequestLaw:
    """What reading takes by length, and a step by what is before it: milliseconds = fixed + slope x context."""

    prefill: PrefillCurve
    step_fixed_ms: float
    step_slope_ms: float

    @staticmethod
    def fitted(reads: Mapping[int, Timing], steps: Mapping[int, Timing]) -> RequestLaw:
        """Raises ValueError for fewer lengths than `LEAST_LENGTHS`."""
        prefill = theory.fit_prefill(list(reads), [timing.median_ms / 1e3 for timing in reads.values()])
        steps_ms = [timing.median_ms for timing in steps.values()]
        if len(steps) < 2:
            return RequestLaw(prefill, steps_ms[0], 0.0)
        slope, fixed = np.polyfit(list(steps), steps_ms, 1)
        if slope < 0:  # noise: a longer context takes nothing off
            return RequestLaw(prefill, float(np.mean(steps_ms)), 0.0)
        return RequestLaw(prefill, float(fixed), float(slope))

    def step_ms(self, context: float) -> float:
        return self.step_fixed_ms + self.step_slope_ms * context

    def predict(self, shape: Shape) -> RequestTime:
        """The first token comes with the prompt; those after it are written behind a growing context."""
        middle = shape.prompt_tokens + (shape.new_tokens - 1) / 2
        ttft_s = self.prefill.seconds(shape.prompt_tokens)
        return theory.request_time(ttft_s, self.step_ms(middle) / 1e3, shape.new_tokens)
