"""Speed-ups with intervals and verdicts: paired over (prompt, repeat), since prompts differ more than arms do.

Prompts of one batch are one pair (they share passes). Repeats are pairs of their own: with them an interval speaks of
the prompts that were measured, not of others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.metrics import is_repetitive, request_metrics
from experiments.trace import RequestTimeline

# A ratio over fewer tokens is mostly noise.
MIN_NEW_TOKENS = 8
# With fewer pairs even a difference in all of them can be chance: 2 x 2^-5 > 5 %.
MIN_PAIRS = 6
CONFIDENCE = 0.95
# All sign patterns of 12 pairs.
NUM_PATTERNS = 4096
POWER = 0.8
FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference shown"
TOO_FEW = f"fewer than {MIN_PAIRS} pairs"
Unit = tuple[int, int]  # (request id, repeat)
Timelines = Mapping[Unit, RequestTimeline]


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of paired ratios with its interval; no interval for fewer than `MIN_PAIRS` pairs.

    `sd_log` is the standard deviation of the logarithms.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    num_pairs: int
    sd_log: float = 0.0

    @staticmethod
    def of(ratios: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Ratio | None:
        """The interval is a paired bootstrap's on the mean of logarithms; None for no ratios at all."""
        if not ratios:
            return None
        logs = np.log(ratios)
        mean, count = float(logs.mean()), len(logs)
        spread = float(logs.std(ddof=1)) if count > 1 else 0.0
        if count < MIN_PAIRS:
            return Ratio(math.exp(mean), None, None, count, spread)
        low, high = _bootstrap_interval(logs, confidence, seed)
        return Ratio(math.exp(mean), math.exp(low), math.exp(high), count, spread)

    @property
    def verdict(self) -> str:
        """Is the interval above 1 (faster), below (slower), or neither?"""
        if self.ci_low is None or self.ci_high is None:
            return TOO_FEW
        if self.ci_low > 1:
            return FASTER
        return SLOWER if self.ci_high < 1 else NO_DIFFERENCE


def detectable_frac(ratio: Ratio) -> float | None:
    """The difference that as many pairs, as noisy as these, show with a probability of 80 %: 0.05 is 5 %.

    None for too few pairs. The usual approximation for a two-sided t-test (Cohen 1988, chapter 2).
    """
    if ratio.num_pairs < MIN_PAIRS:
        return None
    freedom = ratio.num_pairs - 1
    quantiles = stats.t.ppf(1 - (1 - CONFIDENCE) / 2, freedom) + stats.t.ppf(POWER, freedom)
    return math.expm1(quantiles * ratio.sd_log / math.sqrt(ratio.num_pairs))


@dataclass(frozen=True)
class Speedups:
    """One arm against another: reference time / its time, so above 1 is faster. None where no pair is usable."""

    decode: Ratio | None
    total: Ratio | None
    ttft: Ratio | None


def speedups(arm: Timelines, reference: Timelines, confidence: float = CONFIDENCE) -> Speedups:
    return Speedups(
        decode_speedup(arm, reference, confidence),
        total_speedup(arm, reference, confidence),
        ttft_speedup(arm, reference, confidence),
    )


def by_unit(timelines: Sequence[RequestTimeline]) -> dict[Unit, RequestTimeline]:
    return {(timeline.request_id, timeline.repeat): timeline for timeline in timelines}


def excluded_units(*arms: Timelines) -> dict[Unit, str]:
    """Units that no speed-up is computed from, with the reason: too short, or a text that ends in a loop."""
    reasons = {}
    for arm in arms:
        for unit, timeline in arm.items():
            if timeline.num_tokens < MIN_NEW_TOKENS:
                reasons[unit] = f"only {timeline.num_tokens} new tokens"
            elif is_repetitive(timeline.token_ids):
                reasons[unit] = "ends in a loop"
    return reasons


def decode_speedup(arm: Timelines, reference: Timelines, confidence: float = CONFIDENCE) -> Ratio | None:
    """Geometric mean of reference TPOT / the arm's TPOT."""

    def tpot_ms(timeline: RequestTimeline, num_tokens: int) -> float | None:
        return request_metrics(timeline).tpot_ms

    return _ratio(arm, reference, tpot_ms, confidence)


def total_speedup(arm: Timelines, reference: Timelines, confidence: float = CONFIDENCE) -> Ratio | None:
    """Geometric mean of the ratio of times to the n-th token, n being the shorter output's length."""
    return _ratio(arm, reference, _time_to_s, confidence)


def ttft_speedup(arm: Timelines, reference: Timelines, confidence: float = CONFIDENCE) -> Ratio | None:
    """Geometric mean of reference TTFT / the arm's TTFT."""

    def ttft_ms(timeline: RequestTimeline, num_tokens: int) -> float:
        return request_metrics(timeline).ttft_ms

    return _ratio(arm, reference, ttft_ms, confidence)


def _ratio(
    arm: Timelines,
    reference: Timelines,
    time_of: Callable[[RequestTimeline, int], float | None],
    confidence: float,
) -> Ratio | None:
    """`time_of` gets a timeline and the length of the shorter of the two outputs.

    Requests that were decoded together share their passes, and with them the noise: they are one pair, of which the
    mean of the logarithms counts.
    """
    logs: dict[tuple[int, int, bool], list[float]] = {}
    excluded = excluded_units(arm, reference)
    for unit in arm:
        if unit in reference and unit not in excluded:
            shorter = min(arm[unit].num_tokens, reference[unit].num_tokens)
            ours, theirs = time_of(arm[unit], shorter), time_of(reference[unit], shorter)
            if ours and theirs:
                logs.setdefault(_decoded_together(arm[unit]), []).append(math.log(theirs / ours))
    return Ratio.of([math.exp(sum(found) / len(found)) for found in logs.values()], confidence)


def _decoded_together(timeline: RequestTimeline) -> tuple[int, int, bool]:
    alone = timeline.block is None
    return timeline.request_id if timeline.block is None else timeline.block, timeline.repeat, alone


def _time_to_s(timeline: RequestTimeline, num_tokens: int) -> float:
    written = 0
    for time_s, size in zip(timeline.commit_times_s, timeline.commit_sizes, strict=True):
        written += size
        if written >= num_tokens:
            return time_s - timeline.admitted_s
    raise ValueError(
        f"request {timeline.request_id} has {timeline.num_tokens} tokens, asked for {num_tokens}"
    )


def _bootstrap_interval(values: np.ndarray, confidence: float, seed: int) -> tuple[float, float]:
    """Of the mean: all values that a wild bootstrap test (Rademacher weights, null imposed) does not reject.

    Under the null a pair's sign is a coin toss, whatever the size of the noise, so the test is exact where arms differ
    by symmetric noise alone; on recorded times of one arm beside itself a percentile bootstrap rejected 8 % instead of
    5 %, being led by outliers. Sources: Liu 1988; Davidson and Flachaire 2008, "The wild bootstrap, tamed at last".

    The test of a mean m + d compares |mean(signs x (values - m - d))| with |d|: each sign pattern lets d pass within
    an interval that has a closed form, and the limits are quantiles of the ends of those.
    """
    signs = _sign_patterns(len(values), seed)
    mean, balance = values.mean(), signs.mean(1)
    flipped = signs @ (values - mean) / len(values)
    ends = np.full((2, len(signs)), np.inf)  # all equal signs let everything pass
    np.divide(flipped, 1 + balance, out=ends[0], where=balance > -1)
    np.divide(-flipped, 1 - balance, out=ends[1], where=balance < 1)
    certain = np.abs(balance) == 1
    upper = np.where(certain, np.inf, ends.max(0))
    lower = np.where(certain, -np.inf, ends.min(0))
    high = np.quantile(upper, confidence, method="higher")
    low = np.quantile(lower, 1 - confidence, method="lower")
    return float(mean + low), float(mean + high)


def _sign_patterns(count: int, seed: int) -> np.ndarray:
    """All of them `[2^count, count]` where those are few, else a sample."""
    if 2**count <= NUM_PATTERNS:
        return np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
    return np.random.default_rng(seed).choice((-1.0, 1.0), size=(NUM_PATTERNS, count))
