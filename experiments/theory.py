"""The arithmetic of reading and writing: what passes, caches and requests must cost, before anything is measured.

A pass reads every weight once, whatever the number of its tokens, and multiplies every token with every weight. It
takes the longer of the two: the roofline of Williams, Waterman and Patterson 2009, applied to inference as by Pope et
al., "Efficiently Scaling Transformer Inference", 2022, section 2. Bytes and operations of a pass are `ModelCost`'s,
here as for measured passes. Knows no machine and no model: those are `known_devices` and `known_models`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from experiments.metrics import break_even_acceptance
from experiments.roofline import GIGA, Ceilings, ModelCost
from experiments.trace import PassEvent
from specdec.costs import PassCosts
from specdec.types import Prospect

COMPUTE, MEMORY = "compute", "memory"


@dataclass(frozen=True)
class PassCost:
    """What a pass takes for its arithmetic and for its reading; the two overlap, so it takes the longer."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def limit(self) -> str:
        return COMPUTE if self.compute_s > self.memory_s else MEMORY

    @property
    def imbalance(self) -> float:
        """How many times as long as the other the limiting side takes: 1 at the ridge."""
        shorter_s = min(self.compute_s, self.memory_s)
        return self.seconds / shorter_s if shorter_s else math.inf


def pass_cost(
    parameters: float, tokens: int, read_gb_s: float, gemm_tflop_s: float, bytes_per_weight: float = 2.0
) -> PassCost:
    """A pass over so many tokens, of the weights alone: no cache, no attention, every weight read and multiplied.

    Raises ValueError for a number that is not above 0.
    """
    _check_above_zero(
        parameters=parameters,
        tokens=tokens,
        read_gb_s=read_gb_s,
        gemm_tflop_s=gemm_tflop_s,
        bytes_per_weight=bytes_per_weight,
    )
    return cost_of(
        prompt_pass(tokens),
        weights_only(parameters, bytes_per_weight),
        Ceilings(read_gb_s, 1e3 * gemm_tflop_s),
    )


def cost_of(event: PassEvent, cost: ModelCost, ceilings: Ceilings) -> PassCost:
    """Any pass of any model, attention and cache included."""
    return PassCost(
        compute_s=cost.operations(event) / (GIGA * ceilings.gemm_gflop_s),
        memory_s=cost.bytes_moved(event) / (GIGA * ceilings.read_gb_s),
    )


def weights_only(parameters: float, bytes_per_weight: float = 2.0) -> ModelCost:
    """A model as the articles see it: every parameter is read by each pass and multiplied with each token."""
    return ModelCost(
        weights_read_bytes=round(parameters * bytes_per_weight),
        embedding_row_bytes=0,
        kv_bytes_per_token=0,
        body_parameters=round(parameters),
        head_parameters=0,
        attention_width=0,
    )


def prompt_pass(tokens: int) -> PassEvent:
    """A prompt read in one pass."""
    return PassEvent("prefill", 0.0, 0.0, (tokens,), tokens, (tokens,), tokens)


def decode_pass(context_tokens: int, num_rows: int = 1, seconds: float = 0.0) -> PassEvent:
    """One token for each of `num_rows` sequences of `context_tokens`, the new one included."""
    lengths = (context_tokens,) * num_rows
    return PassEvent("decode", 0.0, seconds, (1,) * num_rows, 1, lengths, sum(lengths))


def verify_pass(tokens: int, context_tokens: int) -> PassEvent:
    """Several new tokens of one sequence of `context_tokens`, the new ones included, with logits for each."""
    return PassEvent("verify", 0.0, 0.0, (tokens,), tokens, (context_tokens,), context_tokens)


# --- the roof


def ridge_flop_per_byte(ceilings: Ceilings) -> float:
    """The arithmetic intensity at which reading and arithmetic take equally long."""
    return ceilings.gemm_gflop_s / ceilings.read_gb_s


def arithmetic_intensity(tokens: float, bytes_per_weight: float = 2.0) -> float:
    """Operations per byte of weights in a pass over so many tokens: a multiplication and an addition for each."""
    return 2 * tokens / bytes_per_weight


def ridge_tokens(ceilings: Ceilings, bytes_per_weight: float = 2.0) -> float:
    """Tokens in a pass from which on it is limited by arithmetic: prompt tokens, rows of a batch, or drafts + 1."""
    return ridge_flop_per_byte(ceilings) / arithmetic_intensity(1, bytes_per_weight)


def write_read_ratio(
    tokens: int, parameters: float, ceilings: Ceilings, bytes_per_weight: float = 2.0
) -> float:
    """How much longer writing so many tokens takes than reading them: at most `tokens`, and less above the ridge."""
    cost = weights_only(parameters, bytes_per_weight)
    writing_s = tokens * cost_of(decode_pass(1), cost, ceilings).seconds
    return writing_s / cost_of(prompt_pass(tokens), cost, ceilings).seconds


# --- the cache


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: float = 2.0
) -> float:
    """A key and a value of each layer and key-value head (Shazeer 2019; Ainslie et al. 2023 for grouped heads)."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def equal_cache_tokens(weights_bytes: float, kv_bytes_per_token: float) -> float:
    """Cached tokens, of one sequence or of a whole batch, that take as much memory and reading as the weights."""
    _check_above_zero(kv_bytes_per_token=kv_bytes_per_token)
    return weights_bytes / kv_bytes_per_token


def cache_capacity_tokens(memory_bytes: float, weights_bytes: float, kv_bytes_per_token: float) -> int:
    """Cached tokens that fit beside the weights; 0 where the weights don't fit."""
    _check_above_zero(kv_bytes_per_token=kv_bytes_per_token)
    return max(0, math.floor((memory_bytes - weights_bytes) / kv_bytes_per_token))


def batch_capacity(
    memory_bytes: float, weights_bytes: float, kv_bytes_per_token: float, tokens_per_sequence: int
) -> int:
    """Sequences of that length whose caches fit beside the weights."""
    _check_above_zero(tokens_per_sequence=tokens_per_sequence)
    return cache_capacity_tokens(memory_bytes, weights_bytes, kv_bytes_per_token) // tokens_per_sequence


def tokens_processed(prompt_tokens: int, new_tokens: int, *, is_cached: bool) -> int:
    """Tokens of all passes that write `new_tokens`.

    With a cache the prompt and then each new token but the last, once; without one the whole text before every new
    token: n(n + 1)/2 after a prompt of one token, where with a cache it is n.
    """
    _check_above_zero(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    if is_cached:
        return prompt_tokens + new_tokens - 1
    return new_tokens * prompt_tokens + new_tokens * (new_tokens - 1) // 2


# --- requests


@dataclass(frozen=True)
class RequestTime:
    """A request's time by phase: the prompt with the first token, and the tokens after it."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def prefill_frac(self) -> float:
        return self.prefill_s / self.total_s


def request_time(ttft_s: float, itl_s: float, new_tokens: int) -> RequestTime:
    """Total = TTFT + (n - 1) x ITL, the identity that measured requests fulfil too."""
    _check_above_zero(new_tokens=new_tokens)
    return RequestTime(ttft_s, (new_tokens - 1) * itl_s)


def predicted_request(
    cost: ModelCost, ceilings: Ceilings, prompt_tokens: int, new_tokens: int
) -> RequestTime:
    """One request alone, pass by pass as its cache grows; without overhead, so no request can be faster."""
    _check_above_zero(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    contexts = range(prompt_tokens + 1, prompt_tokens + new_tokens)
    return RequestTime(
        cost_of(prompt_pass(prompt_tokens), cost, ceilings).seconds,
        sum(cost_of(decode_pass(context), cost, ceilings).seconds for context in contexts),
    )


# --- prefill


@dataclass(frozen=True)
class PrefillCurve:
    """Time to read n tokens = fixed + linear x n + quadratic x n^2; the last is attention."""

    fixed_s: float
    linear_s: float
    quadratic_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.linear_s * tokens + self.quadratic_s * tokens**2

    def quadratic_frac(self, tokens: float) -> float:
        return self.quadratic_s * tokens**2 / self.seconds(tokens)

    @property
    def equal_tokens(self) -> float:
        """Where the quadratic part is as long as the linear one; infinite without a quadratic part."""
        return self.linear_s / self.quadratic_s if self.quadratic_s else math.inf


def prefill_curve(cost: ModelCost, ceilings: Ceilings) -> PrefillCurve:
    """Of the arithmetic alone: `ModelCost.operations` of a prompt, as a polynomial in its length."""
    per_s = GIGA * ceilings.gemm_gflop_s
    one, products = prompt_pass(1), replace(cost, attention_width=0)
    head = replace(products, body_parameters=0).operations(one)
    # n new tokens attend to n(n + 1)/2 positions: half of what the first one costs goes with n, half with its square.
    half = (cost.operations(one) - products.operations(one)) / 2
    return PrefillCurve(head / per_s, (products.operations(one) - head + half) / per_s, half / per_s)


def fit_prefill(tokens: Sequence[float], seconds: Sequence[float]) -> PrefillCurve:
    """The curve through measured times: least squares of relative errors, no part negative.

    Raises ValueError for fewer than three points, of which it would say nothing.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 3:
        raise ValueError(f"tokens={list(tokens)}: expected at least three lengths, each with its time")
    times = np.asarray(seconds, dtype=float)
    # Columns of a like size: squares of long prompts would drown the rest.
    scale = float(max(tokens))
    powers = np.vander(np.asarray(tokens, dtype=float) / scale, 3, increasing=True)
    parts, _ = nnls(powers / times[:, None], np.ones(len(times)))
    return PrefillCurve(float(parts[0]), float(parts[1] / scale), float(parts[2] / scale**2))


# --- speculation


def pass_table(
    cost: ModelCost, ceilings: Ceilings, max_tokens: int, context_tokens: int = 1
) -> tuple[float, ...]:
    """Seconds of a pass over 1, 2, ... `max_tokens` new tokens after `context_tokens`: `PassCosts.target`."""
    _check_above_zero(max_tokens=max_tokens)
    return tuple(
        cost_of(verify_pass(tokens, context_tokens + tokens), cost, ceilings).seconds
        for tokens in range(1, max_tokens + 1)
    )


def break_even(costs: PassCosts, num_drafted: int, kind: str = Prospect.kind) -> float | None:
    """The acceptance rate from which on drafting so many tokens pays; None where even 1 is not enough."""
    return break_even_acceptance(num_drafted, 0.0, costs.step(num_drafted, kind) / costs.plain)


def _check_above_zero(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: expected a number above 0")
