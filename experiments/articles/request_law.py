"""What a request will take by its shape, from what reading and steps were measured to take by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from experiments import theory
from experiments.articles.fits import line_through
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
        fixed, slope = line_through({context: timing.median_ms for context, timing in steps.items()})
        if slope < 0:  # noise: a longer context takes nothing off
            return RequestLaw(prefill, mean(steps_ms), 0.0)
        return RequestLaw(prefill, fixed, slope)

    def step_ms(self, context: float) -> float:
        return self.step_fixed_ms + self.step_slope_ms * context

    def predict(self, shape: Shape) -> RequestTime:
        """The first token comes with the prompt; those after it are written behind a growing context."""
        # The first step is behind the prompt alone, the last behind all but two of the new tokens as well.
        middle = shape.prompt_tokens + max(0, shape.new_tokens - 2) / 2
        ttft_s = self.prefill.seconds(shape.prompt_tokens)
        return theory.request_time(ttft_s, self.step_ms(middle) / 1e3, shape.new_tokens)
