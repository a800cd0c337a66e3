"""A scheduler's move, on one runner: a new prompt is read chunk by chunk, and between chunks the other rows step.

That is chunked prefill without mixing both into one pass (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve", 2024): each chunk and each step is a pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from experiments.articles.lab import PREFILL_CHUNK, Lab, limits
from experiments.articles.timing import Clock
from experiments.measure import no_garbage_collection
from experiments.metrics import MIN_SAMPLES_P99
from specdec.runner import ModelRunner


@dataclass(frozen=True)
class Arrival:
    """One prompt that arrived while others decoded: milliseconds until its first token, and between their steps."""

    ttft_ms: float
    reading_ms: float
    gaps_ms: tuple[float, ...]


@dataclass(frozen=True)
class Arrivals:
    """The same again and again; `idle_ms`: a step of the others before each. `first_ttft_ms` is one of before them."""

    runs: Sequence[Arrival]
    idle_ms: Sequence[float]
    first_ttft_ms: float

    @property
    def num_chunks(self) -> int:
        return len(self.runs[0].gaps_ms)

    @property
    def ttft_ms(self) -> float:
        return median(run.ttft_ms for run in self.runs)

    @property
    def reading_ms(self) -> float:
        """Of the time to the first token, that of its own chunks; the rest are steps of the others."""
        return median(run.reading_ms for run in self.runs)

    @property
    def longest_gap_ms(self) -> float:
        """A median of the longest of each run: one disturbance does not decide it."""
        return median(max(run.gaps_ms) for run in self.runs)

    @property
    def median_gap_ms(self) -> float:
        return median(gap for run in self.runs for gap in run.gaps_ms)

    @property
    def idle_gap_ms(self) -> float:
        return median(self.idle_ms)

    @property
    def p99_gap_ms(self) -> float | None:
        """None where there are too few of them."""
        gaps_ms = [gap for run in self.runs for gap in run.gaps_ms]
        return float(np.percentile(gaps_ms, 99)) if len(gaps_ms) >= MIN_SAMPLES_P99 else None


def arrivals(
    lab: Lab,
    rows: int,
    context: int,
    prompt_tokens: int,
    chunk: int,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> Arrivals:
    """`rows` rows behind `context` tokens decode while one more is read; a first run is not counted.

    Raises LimitError.
    """
    capacity = max(context + 1 + -(-prompt_tokens // chunk), prompt_tokens + 1)
    runner = lab.runner(rows + 1, capacity, PREFILL_CHUNK)
    texts = [lab.random_ids(context, row) for row in range(rows)]
    prompt = lab.random_ids(prompt_tokens, rows)
    idle_ms, runs = [], []
    with limits(), no_garbage_collection(), torch.inference_mode():
        for _ in range(repeats + 1):
            newest = runner.prefill(texts, range(rows)).argmax(-1).tolist()
            start_s = clock()
            newest = step(runner, newest)
            idle_ms.append(1e3 * (clock() - start_s))
            runs.append(one_arrival(runner, prompt, chunk, newest, clock))
            # Read anew: what steps have made final is not rolled back.
            for slot in range(rows + 1):
                runner.release(slot)
    return Arrivals(runs[1:], idle_ms[1:], runs[0].ttft_ms)


def one_arrival(
    runner: ModelRunner, prompt: Sequence[int], chunk: int, newest: Sequence[int], clock: Clock
) -> Arrival:
    """The prompt comes right after a step of the others; the last step has its first token beside theirs."""
    slot, tokens = len(newest), list(newest)
    gaps_ms, reading_ms = [], 0.0
    arrived_s = stepped_s = clock()
    for start in range(0, len(prompt), chunk):
        first = runner.extend(prompt[start : start + chunk], slot).argmax(-1).tolist()
        read_s = clock()
        reading_ms += 1e3 * (read_s - stepped_s)
        if start + chunk >= len(prompt):
            tokens += first
        tokens = step(runner, tokens)
        now_s = clock()
        gaps_ms.append(1e3 * (now_s - stepped_s))
        stepped_s = now_s
    return Arrival(1e3 * (read_s - arrived_s), reading_ms, tuple(gaps_ms))


def step(runner: ModelRunner, newest: Sequence[int]) -> list[int]:
    """One decode step of slots 0, 1, ...: their next tokens."""
    logits = runner.decode(torch.tensor([[token] for token in newest], device=runner.device))
    runner.commit(runner.lengths[: len(newest)])
    return logits.argmax(-1).tolist()
