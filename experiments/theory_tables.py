"""Tables of the articles' arithmetic: published values beside computed ones, and what follows for other sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from experiments import theory
from experiments.article_values import (
    BYTES_PER_WEIGHT,
    PARAMETERS,
    PEAK,
    PROMPT_TOKENS,
    SUSTAINED,
    published_values,
)
from experiments.known_devices import H100_SXM, KNOWN_DEVICES, KnownDevice
from experiments.known_models import KNOWN_MODELS, LLAMA_3_1_8B, LLAMA_3_2_1B, KnownModel
from experiments.roofline import GIGA, Ceilings, floor_ms
from specdec.costs import PassCosts

Table = tuple[str, list[str], list[list[str]]]

# Prompt and new tokens. The inverted case is the articles'; of the other two they say short or long only.
SHAPES = {"chat": (100, 500), "document question": (8000, 200), "inverted": (100_000, 50)}


def theory_tables() -> list[Table]:
    """Title, header and rows of each table, as text."""
    return [
        _published(),
        _passes(),
        _devices(),
        _models(),
        _caches(),
        _weight_formats(),
        _work(),
        _shapes(),
        _prefill(),
        _break_even(),
    ]


def _published() -> Table:
    verdicts = {True: "yes", False: "no", None: "can't be computed"}
    rows = [
        [
            value.quantity,
            f"{_exact(value.published)} {value.unit}",
            "" if value.computed is None else f"{_number(value.computed)} {value.unit}",
            verdicts[value.agrees],
            value.how,
        ]
        for value in published_values()
    ]
    header = ["quantity", "published", "computed", "equal as rounded", "how"]
    return "The articles' arithmetic, published and computed", header, rows


def _passes() -> Table:
    rows = []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 125, 295, 512, PROMPT_TOKENS, 8192):
        row = [f"{tokens:,}", _number(theory.arithmetic_intensity(tokens, BYTES_PER_WEIGHT))]
        for ceilings in (SUSTAINED, PEAK):
            cost = theory.pass_cost(
                PARAMETERS, tokens, ceilings.read_gb_s, ceilings.gemm_gflop_s / 1e3, BYTES_PER_WEIGHT
            )
            row += [_ms(cost.compute_s), _ms(cost.memory_s), f"{cost.limit}, {_number(cost.imbalance)}x"]
        rows.append(row)
    rates = [f"{ceilings.gemm_gflop_s / 1e3:.0f}" for ceilings in (SUSTAINED, PEAK)]
    parts = ["arithmetic, ms", "reading, ms", "limited by"]
    header = ["tokens", "FLOP/byte", *(f"{part} ({rate})" for rate in rates for part in parts)]
    title = f"A pass over 8e9 parameters in 16 bits on an H100 (3.35 TB/s), at {' and '.join(rates)} TFLOP/s"
    return title, header, rows


def _devices() -> Table:
    header = [
        "device", "GB/s", "16-bit TFLOP/s", "ridge, FLOP/byte", "memory, GB", "8B in 16 bits: floor, ms", "tok/s",
        "source",
    ]  # fmt: skip
    return "Devices, as their makers describe them", header, [_device(d) for d in KNOWN_DEVICES.values()]


def _device(device: KnownDevice) -> list[str]:
    floor = floor_ms(theory.weights_only(PARAMETERS), Ceilings(device.read_gb_s, math.inf))
    is_known = device.gemm_tflop_s is not None
    return [
        device.name,
        f"{device.read_gb_s:,.0f}",
        f"{device.gemm_tflop_s:,.0f}" if is_known else "not published",
        f"{theory.ridge_flop_per_byte(device.ceilings):,.0f}" if is_known else "",
        f"{device.memory_gb:,.0f}",
        f"{floor:.1f}",
        f"{1e3 / floor:.0f}",
        device.source,
    ]


def _models() -> Table:
    header = [
        "model", "parameters", "16 bits, GB", "cache of a token, bytes", "cache equals weights at, tokens",
        "context, tokens", f"sequences of 8,192 beside it in {H100_SXM.memory_gb:.0f} GB",
    ]  # fmt: skip
    return "Models: weights against cache", header, [_model(model) for model in KNOWN_MODELS.values()]


def _model(model: KnownModel) -> list[str]:
    weights, kv_bytes = model.weights_bytes(), model.kv_bytes_per_token()
    fits = theory.batch_capacity(GIGA * H100_SXM.memory_gb, weights, kv_bytes, 8192)
    return [
        model.name,
        f"{model.num_parameters:,}",
        f"{weights / GIGA:.2f}",
        f"{kv_bytes:,.0f}",
        f"{theory.equal_cache_tokens(weights, kv_bytes):,.0f}",
        f"{model.context_tokens:,}",
        f"{fits} (longer than its context)" if model.context_tokens < 8192 else str(fits),
    ]


def _caches() -> Table:
    weights = LLAMA_3_1_8B.weights_bytes()
    rows = []
    for bits in (16, 8, 4, 2):
        kv_bytes = LLAMA_3_1_8B.kv_bytes_per_token(bits / 8)
        fits = [
            theory.batch_capacity(GIGA * H100_SXM.memory_gb, weights, kv_bytes, n)
            for n in (1024, 8192, 131_072)
        ]
        equal = theory.equal_cache_tokens(weights, kv_bytes)
        rows.append([f"{bits}", f"{kv_bytes:,.0f}", f"{equal:,.0f}", *map(str, fits)])
    header = ["bits of a value", "bytes of a token", "equals weights at, tokens"]
    header += [f"sequences of {n}" for n in ("1,024", "8,192", "131,072")]
    return "Llama 3.1 8B in 16 bits, 80 GB: what the cache's bits change (scales left out)", header, rows


def _weight_formats() -> Table:
    rows = []
    for bits in (16, 8, 4):
        floor = floor_ms(theory.weights_only(PARAMETERS, bits / 8), PEAK)
        ridge = theory.ridge_tokens(PEAK, bits / 8)
        rows.append(
            [
                f"{bits}",
                f"{PARAMETERS * bits / 8 / GIGA:.0f}",
                f"{floor:.2f}",
                f"{1e3 / floor:.0f}",
                f"{ridge:.0f}",
            ]
        )
    header = [
        "bits of a weight",
        "weights, GB",
        "decode floor, ms",
        "tok/s",
        "limited by arithmetic from, tokens",
    ]
    return "8e9 parameters on an H100: fewer bits, products in 16 bits (scales left out)", header, rows


def _work() -> Table:
    rows = []
    for new_tokens in (10, 100, 512, 1000, 10_000):
        cached = theory.tokens_processed(1, new_tokens, is_cached=True)
        uncached = theory.tokens_processed(1, new_tokens, is_cached=False)
        rows.append([f"{new_tokens:,}", f"{cached:,}", f"{uncached:,}", f"{new_tokens**2 // 2:,}"])
    header = ["new tokens, n", "tokens processed with a cache", "without", "n^2 / 2"]
    return "Work with and without a cache, after a prompt of one token", header, rows


def _shapes() -> Table:
    rows = []
    for name, (prompt_tokens, new_tokens) in SHAPES.items():
        time = theory.predicted_request(LLAMA_3_1_8B.cost(), SUSTAINED, prompt_tokens, new_tokens)
        itl_s = time.decode_s / (new_tokens - 1)
        rows.append(
            [
                name,
                f"{prompt_tokens:,}",
                f"{new_tokens:,}",
                _ms(time.prefill_s),
                _ms(itl_s),
                f"{theory.request_time(time.prefill_s, itl_s, new_tokens).total_s:.2f}",
                f"{100 * time.prefill_frac:.0f} %",
            ]
        )
    header = [
        "shape",
        "prompt tokens",
        "new tokens",
        "TTFT, ms",
        "mean ITL, ms",
        "total, s",
        "prefill's share",
    ]
    return "Llama 3.1 8B, one request on an H100 (3.35 TB/s, 420 TFLOP/s): where the time goes", header, rows


def _prefill() -> Table:
    curve = theory.prefill_curve(LLAMA_3_1_8B.cost(), SUSTAINED)
    rows = [
        [f"{tokens:,}", _ms(curve.seconds(tokens)), f"{tokens / curve.seconds(tokens):,.0f}",
         f"{100 * curve.quadratic_frac(tokens):.1f} %"]
        for tokens in (128, 1024, 8192, round(curve.equal_tokens), 131_072)
    ]  # fmt: skip
    header = ["prompt tokens", "arithmetic, ms", "tok/s", "quadratic part"]
    return "Llama 3.1 8B, reading a prompt at 420 TFLOP/s: linear and quadratic part", header, rows


def _break_even() -> Table:
    target = theory.pass_table(LLAMA_3_1_8B.cost(), SUSTAINED, 17, context_tokens=1024)
    one_draft = theory.pass_table(LLAMA_3_2_1B.cost(), SUSTAINED, 1, context_tokens=1024)[0]
    costs = PassCosts(target, {"lookup": (0.0,), "model": tuple(one_draft * count for count in range(17))})
    rows = []
    for drafted in (1, 2, 4, 8, 16):
        verify = target[drafted] / target[0]
        rows.append([f"{drafted}", f"{verify:.3f}", *_rates(costs, drafted)])
    header = [
        "draft tokens",
        "verify pass / plain pass",
        "break-even, lookup",
        "break-even, Llama 3.2 1B drafts",
    ]
    return "Llama 3.1 8B after 1,024 tokens: the acceptance from which speculation pays", header, rows


def _rates(costs: PassCosts, drafted: int) -> Iterator[str]:
    for kind in costs.draft:
        rate = theory.break_even(costs, drafted, kind)
        yield "never" if rate is None else f"{100 * rate:.1f} %"


def _ms(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    """Four digits, whole numbers whole."""
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _exact(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6f}".rstrip("0").rstrip(".")
