"""Speed-ups with intervals: paired over (prompt, repeat), since prompts differ more than arms do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from experiments.metrics import is_repetitive, request_metrics
from experiments.trace import RequestTimeline

# A ratio over fewer tokens is mostly noise.
MIN_NEW_TOKENS = 8
CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
Unit = tuple[int, int]  # (request id, repeat)


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of paired ratios with its bootstrap interval; the interval is None for a single pair."""

    value: float
    ci_low: float | None
    ci_high: float | None
    num_pairs: int

    @staticmethod
    def of(ratios: Sequence[float], seed: int = 0) -> Ratio | None:
        """None for no ratios at all."""
        if not ratios:
            return None
        logs = np.log(ratios)
        if len(logs) < 2:
            return Ratio(float(np.exp(logs.mean())), None, None, len(logs))
        interval = bootstrap(
            (logs,),
            np.mean,
            confidence_level=CONFIDENCE,
            n_resamples=NUM_RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        low, high = np.exp(interval.low), np.exp(interval.high)
        return Ratio(float(np.exp(logs.mean())), float(low), float(high), len(logs))


def by_unit(timelines: Sequence[RequestTimeline]) -> dict[Unit, RequestTimeline]:
    return {(timeline.request_id, timeline.repeat): timeline for timeline in timelines}


def excluded_units(*arms: Mapping[Unit, RequestTimeline]) -> dict[Unit, str]:
    """Units that no speed-up is computed from, with the reason: too short, or a text that ends in a loop."""
    reasons = {}
    for arm in arms:
        for unit, timeline in arm.items():
            if timeline.num_tokens < MIN_NEW_TOKENS:
                reasons[unit] = f"only {timeline.num_tokens} new tokens"
            elif is_repetitive(timeline.token_ids):
                reasons[unit] = "ends in a loop"
    return reasons


def decode_speedup(
    strategy: Mapping[Unit, RequestTimeline], reference: Mapping[Unit, RequestTimeline]
) -> Ratio | None:
    """Geometric mean of reference TPOT / strategy TPOT: above 1 is faster."""
    ratios = []
    for unit in _usable(strategy, reference):
        ours, theirs = request_metrics(strategy[unit]).tpot_ms, request_metrics(reference[unit]).tpot_ms
        if ours and theirs:
            ratios.append(theirs / ours)
    return Ratio.of(ratios)


def total_speedup(
    strategy: Mapping[Unit, RequestTimeline], reference: Mapping[Unit, RequestTimeline]
) -> Ratio | None:
    """Geometric mean of the ratio of times to the n-th token, n being the shorter output's length."""
    ratios = []
    for unit in _usable(strategy, reference):
        shorter = min(strategy[unit].num_tokens, reference[unit].num_tokens)
        ratios.append(_time_to(reference[unit], shorter) / _time_to(strategy[unit], shorter))
    return Ratio.of(ratios)


def _usable(
    strategy: Mapping[Unit, RequestTimeline], reference: Mapping[Unit, RequestTimeline]
) -> list[Unit]:
    excluded = excluded_units(strategy, reference)
    return [unit for unit in strategy if unit in reference and unit not in excluded]


def _time_to(timeline: RequestTimeline, num_tokens: int) -> float:
    written = 0
    for time_s, size in zip(timeline.commit_times_s, timeline.commit_sizes, strict=True):
        written += size
        if written >= num_tokens:
            return time_s - timeline.admitted_s
    raise ValueError(
        f"request {timeline.request_id} has {timeline.num_tokens} tokens, asked for {num_tokens}"
    )
