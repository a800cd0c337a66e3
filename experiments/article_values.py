"""The values that the articles on prefill and decode publish, each beside the one that `theory` computes.

The articles give results, not always what went in. What was worked back from the results is an assumption and is
named as one. `SUSTAINED_TFLOP_S` and `PROMPT_TOKENS` are the round pair that yields 0.0762 s, 0.000038 s, 16x, 125x and
a ridge of 125 all at once: as rounded, the two times allow prompts of 1,978 to 2,033 tokens, and for 2,000 the time of
the prompt allows 419.7 to 420.2 TFLOP/s. The H100's peak of 989 yields the ridge of 295 alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments import theory
from experiments.known_devices import H100_SXM
from experiments.known_models import LLAMA_3_1_8B, QWEN_2_5_0_5B
from experiments.roofline import GIGA, Ceilings, floor_ms, mbu_frac

PARAMETERS = 8e9
BYTES_PER_WEIGHT = 2.0
PROMPT_TOKENS = 2000  # assumed
SUSTAINED_TFLOP_S = 420.0  # assumed: 42 % of the H100's peak
PEAK = H100_SXM.ceilings
SUSTAINED = Ceilings(PEAK.read_gb_s, 1e3 * SUSTAINED_TFLOP_S)
GIB = 2**30


@dataclass(frozen=True)
class Published:
    """A value of the articles and ours; `step` is one unit of the last digit that they give.

    `computed` is None where it takes what they don't say.
    """

    quantity: str
    published: float
    step: float
    unit: str
    computed: float | None
    how: str

    @property
    def agrees(self) -> bool | None:
        """Would ours, rounded as theirs, be theirs? None where there is nothing to compare."""
        if self.computed is None:
            return None
        # Half a step, and what binary fractions add to it.
        return abs(self.computed - self.published) <= self.step * (0.5 + 1e-9)


def published_values() -> list[Published]:
    """All of them, in the order in which one would derive them."""
    return [*_passes(), *_floors(), *_requests(), *_caches()]


def _passes() -> list[Published]:
    prompt = theory.pass_cost(PARAMETERS, PROMPT_TOKENS, PEAK.read_gb_s, SUSTAINED_TFLOP_S, BYTES_PER_WEIGHT)
    token = theory.pass_cost(PARAMETERS, 1, PEAK.read_gb_s, SUSTAINED_TFLOP_S, BYTES_PER_WEIGHT)
    prompt_how = f"2 x 8e9 x {PROMPT_TOKENS} / {SUSTAINED_TFLOP_S:.0f} TFLOP/s (both assumed)"
    return [
        Published("prompt pass, arithmetic", 0.0762, 1e-4, "s", prompt.compute_s, prompt_how),
        Published("prompt pass, reading", 0.0048, 1e-4, "s", prompt.memory_s, "16 GB / 3.35 TB/s"),
        Published(
            "prompt pass, arithmetic / reading", 16, 1, "x", prompt.imbalance, "of the two above, unrounded"
        ),
        Published(
            "one token, arithmetic", 0.000038, 1e-6, "s", token.compute_s, "2 x 8e9 / 420 TFLOP/s (assumed)"
        ),
        Published("one token, reading", 0.0048, 1e-4, "s", token.memory_s, "16 GB / 3.35 TB/s"),
        Published(
            "one token, reading / arithmetic", 125, 1, "x", token.imbalance, "of the two above, unrounded"
        ),
    ]


def _floors() -> list[Published]:
    weights = theory.weights_only(PARAMETERS, BYTES_PER_WEIGHT)
    small = floor_ms(theory.weights_only(0.99 * GIGA, 1.0), Ceilings(262, math.inf))
    measured = theory.decode_pass(1, seconds=1 / 143)
    return [
        Published("decode floor", 4.8, 0.1, "ms", floor_ms(weights, PEAK), "16 GB / 3.35 TB/s"),
        Published("most tokens a second", 209, 1, "tok/s", 1e3 / floor_ms(weights, PEAK), "1 / the floor"),
        Published(
            "143 tok/s, share of the floor",
            68,
            1,
            "%",
            100 * (mbu_frac([measured], weights, PEAK) or 0.0),
            "MBU: 16 GB x 143 / 3.35 TB/s",
        ),
        Published(
            "ridge, peak", 295, 1, "FLOP/byte", theory.ridge_flop_per_byte(PEAK), "989 TFLOP/s / 3.35 TB/s"
        ),
        Published(
            "ridge, sustained",
            125,
            1,
            "FLOP/byte",
            theory.ridge_flop_per_byte(SUSTAINED),
            "420 TFLOP/s (assumed) / 3.35 TB/s",
        ),
        Published(
            "one token, intensity",
            1,
            1,
            "FLOP/byte",
            theory.arithmetic_intensity(1),
            "2 operations / 2 bytes",
        ),
        Published("decode floor of 0.99 GB", 3.8, 0.1, "ms", small, "0.99 GB / 262 GB/s"),
        Published(
            "a model of 0.99 GB",
            0.99,
            0.01,
            "GB",
            QWEN_2_5_0_5B.weights_bytes() / GIGA,
            "Qwen2.5 0.5B in 16 bits (assumed: the articles' model is not named)",
        ),
    ]


def _requests() -> list[Published]:
    return [
        Published("write 512 / read 512 tokens", 190, 10, "x", 5.2 / 0.027, "5.2 s / 27 ms, both measured"),
        Published(
            "write / read, another machine", 19, 1, "x", None, "measured; times and machine are not given"
        ),
        Published(
            "write / read, a third machine", 147, 1, "x", None, "measured; times and machine are not given"
        ),
        Published(
            "weight reads, write / read 512 tokens",
            512,
            1,
            "x",
            theory.write_read_ratio(512, PARAMETERS, Ceilings(1.0, math.inf)),
            "512 passes against one, if arithmetic cost nothing",
        ),
    ]


def _caches() -> list[Published]:
    kv_bytes = LLAMA_3_1_8B.kv_bytes_per_token()
    return [
        Published(
            "cache of one token, 8B model",
            131_072,
            1,
            "bytes",
            kv_bytes,
            "2 x 32 layers x 8 heads x 128 x 2 bytes",
        ),
        Published(
            "cache equals weights, weights of 16 GiB",
            128 * 1024,
            1024,
            "tokens",
            theory.equal_cache_tokens(16 * GIB, kv_bytes),
            "16 x 2^30 / 131,072: exactly 128 x 1024",
        ),
        Published(
            "cache equals weights, weights of Llama 3.1 8B",
            128 * 1024,
            1024,
            "tokens",
            theory.equal_cache_tokens(LLAMA_3_1_8B.weights_bytes(), kv_bytes),
            "8,030,261,248 x 2 bytes / 131,072: about 120 x 1024",
        ),
    ]
