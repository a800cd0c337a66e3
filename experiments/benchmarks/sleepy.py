"""A planted slowdown: plain decoding that sleeps for a share of each step. For testing verdicts, not for use.

python -m experiments.compare plugin=experiments/benchmarks/sleepy.py 'candidates=["baseline decoding=sleepy"]'
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from specdec.decoding.autoregressive import AutoregressiveDecoder
from specdec.decoding.base import DecodingOptions, DecodingParts
from specdec.progress import Progress
from specdec.types import StepOutput

GROUP = "decoding"


class SleepyDecoder(AutoregressiveDecoder):
    """Autoregressive, each step longer by the same share of itself."""

    def __init__(self, parts: DecodingParts, sleep_frac: float) -> None:
        super().__init__(parts)
        self._sleep_frac = sleep_frac

    def step(self, progress: Progress) -> StepOutput:
        start_s = time.perf_counter()
        output = super().step(progress)
        time.sleep(self._sleep_frac * (time.perf_counter() - start_s))
        return output


@dataclass
class SleepyOptions(DecodingOptions):
    """`sleep_frac`: how much longer a step takes; 0.05 is 5 %."""

    sleep_frac: float = 0.05

    def build(self, parts: DecodingParts) -> SleepyDecoder:
        return SleepyDecoder(parts, self.sleep_frac)
