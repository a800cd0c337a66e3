"""The articles' arithmetic: each published value, and the functions against sums counted by hand or by a loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from experiments import theory
from experiments.metrics import break_even_acceptance
from experiments.roofline import Ceilings, ModelCost, floor_ms, mbu_frac
from experiments.theory import PassCost, PrefillCurve, RequestTime
from specdec.costs import PassCosts

# An H100: its peak bandwidth; the rate that the articles' times imply (see article_values), and its peak rate.
READ_GB_S, SUSTAINED_TFLOP_S, PEAK_TFLOP_S = 3350, 420, 989
SUSTAINED = Ceilings(READ_GB_S, 1e3 * SUSTAINED_TFLOP_S)
PEAK = Ceilings(READ_GB_S, 1e3 * PEAK_TFLOP_S)
EIGHT_B = theory.weights_only(8e9)

# Operations a second and bytes a second of one each, in the units of `Ceilings`.
UNIT = Ceilings(1e-9, 1e-9)
SMALL = ModelCost(
    weights_read_bytes=1000,
    embedding_row_bytes=8,
    kv_bytes_per_token=2,
    body_parameters=300,
    head_parameters=70,
    attention_width=5,
)


def articles_pass(tokens: int) -> PassCost:
    return theory.pass_cost(8e9, tokens, READ_GB_S, SUSTAINED_TFLOP_S, 2)


# --- published values


def test_a_prompt_takes_76_ms_of_arithmetic_and_5_ms_of_reading() -> None:
    cost = articles_pass(2000)
    assert (round(cost.compute_s, 4), round(cost.memory_s, 4)) == (0.0762, 0.0048)
    assert cost.limit == "compute"
    assert cost.seconds == cost.compute_s


def test_a_token_takes_38_microseconds_of_arithmetic_and_the_same_reading() -> None:
    cost = articles_pass(1)
    assert (round(cost.compute_s, 6), round(cost.memory_s, 4)) == (0.000038, 0.0048)
    assert cost.limit == "memory"
    assert cost.seconds == cost.memory_s == articles_pass(2000).memory_s


def test_no_other_round_prompt_gives_both_times() -> None:
    """Whatever the rate: the prompt's time over one token's is the prompt's length."""
    fits = [
        tokens
        for tokens in range(100, 10_000, 100)
        for tflop_s in range(100, 2000)
        if round(2 * 8e9 * tokens / (1e12 * tflop_s), 4) == 0.0762
        and round(2 * 8e9 / (1e12 * tflop_s), 6) == 0.000038
    ]
    assert fits == [2000]


def test_a_prompt_is_16_times_as_much_arithmetic_as_reading_a_token_125_times_the_reverse() -> None:
    assert round(articles_pass(2000).imbalance) == 16
    assert round(articles_pass(1).imbalance) == 125


def test_at_most_209_tokens_a_second() -> None:
    floor = floor_ms(EIGHT_B, PEAK)
    assert (round(floor, 1), round(1e3 / floor)) == (4.8, 209)


def test_143_tokens_a_second_are_68_percent_of_the_floor() -> None:
    used = mbu_frac([theory.decode_pass(1, seconds=1 / 143)], EIGHT_B, PEAK)
    assert used is not None
    assert used == pytest.approx(143 * floor_ms(EIGHT_B, PEAK) / 1e3, rel=1e-12)
    assert round(100 * used) == 68


def test_the_ridge_is_at_295_of_the_peak_and_at_125_of_what_the_times_imply() -> None:
    assert round(theory.ridge_flop_per_byte(PEAK)) == 295
    assert round(theory.ridge_flop_per_byte(SUSTAINED)) == 125


def test_a_token_is_one_operation_a_byte_and_a_prompt_as_many_as_its_tokens() -> None:
    assert theory.arithmetic_intensity(1) == 1
    assert theory.arithmetic_intensity(512) == 512
    assert theory.arithmetic_intensity(1, bytes_per_weight=0.5) == 4


def test_a_gigabyte_at_262_a_second_takes_four_milliseconds() -> None:
    assert round(floor_ms(theory.weights_only(0.99e9, 1), Ceilings(262, 1)), 1) == 3.8


def test_reading_512_tokens_in_27_ms_and_writing_them_in_5_seconds_is_190_to_1() -> None:
    assert round(5.2 / 0.027, -1) == 190


def test_512_tokens_are_512_weight_reads_to_write_and_one_to_read() -> None:
    assert theory.write_read_ratio(512, 8e9, Ceilings(1.0, math.inf)) == 512
    # Where arithmetic limits reading, the ratio is the ridge, however long the prompt.
    for tokens in (512, 2000):
        assert theory.write_read_ratio(tokens, 8e9, SUSTAINED) == pytest.approx(420 / 3.35)


def test_a_token_of_an_8b_model_is_131072_bytes_of_cache() -> None:
    assert theory.kv_bytes_per_token(num_layers=32, num_kv_heads=8, head_dim=128) == 131_072


def test_128k_tokens_of_cache_are_16_gib() -> None:
    assert theory.equal_cache_tokens(16 * 2**30, 131_072) == 128 * 1024
    # Decimal gigabytes, which 8e9 parameters take, are fewer.
    assert round(theory.equal_cache_tokens(16e9, 131_072)) == 122_070


def test_work_is_n_with_a_cache_and_half_of_n_squared_without() -> None:
    assert theory.tokens_processed(1, 1000, is_cached=True) == 1000
    without = theory.tokens_processed(1, 1000, is_cached=False)
    assert without == pytest.approx(1000**2 / 2, rel=2e-3)


# --- passes


def test_a_pass_takes_the_longer_of_its_two_times() -> None:
    assert PassCost(2.0, 3.0).seconds == 3.0
    assert PassCost(2.0, 3.0).limit == "memory"
    assert PassCost(6.0, 3.0).seconds == 6.0
    assert PassCost(6.0, 3.0).limit == "compute"
    assert PassCost(6.0, 3.0).imbalance == PassCost(3.0, 6.0).imbalance == 2.0
    assert PassCost(0.0, 3.0).imbalance == math.inf


@pytest.mark.parametrize("name", ["parameters", "tokens", "read_gb_s", "gemm_tflop_s", "bytes_per_weight"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_pass_of_nothing_is_refused(name: str, value: float) -> None:
    arguments = {"parameters": 1, "tokens": 1, "read_gb_s": 1, "gemm_tflop_s": 1, "bytes_per_weight": 1}
    with pytest.raises(ValueError, match=f"^{name}={value}: expected a number above 0$"):
        theory.pass_cost(**{**arguments, name: value})  # type: ignore[arg-type]


def test_a_pass_with_cache_and_attention_is_that_of_the_roofline() -> None:
    two_rows = theory.cost_of(theory.decode_pass(9, num_rows=2), SMALL, UNIT)
    assert two_rows.compute_s == pytest.approx(2 * (2 * 300 + 2 * 70) + 4 * 5 * (9 + 9))
    assert two_rows.memory_s == pytest.approx(1000 + 8 + 2 * (9 + 9) + 2 * 2)
    verify = theory.cost_of(theory.verify_pass(3, 9), SMALL, UNIT)
    assert verify.compute_s == pytest.approx(2 * 3 * (300 + 70) + 4 * 5 * (7 + 8 + 9))
    assert verify.memory_s == pytest.approx(1000 + 2 * 8 + 2 * 9 + 2 * 3)


@pytest.mark.parametrize("bytes_per_weight", [4, 2, 1, 0.5])
def test_arithmetic_limits_from_the_ridge_on(bytes_per_weight: float) -> None:
    ridge = theory.ridge_tokens(PEAK, bytes_per_weight)
    for tokens, limit in ((math.floor(ridge), "memory"), (math.ceil(ridge), "compute")):
        cost = theory.pass_cost(8e9, tokens, READ_GB_S, PEAK_TFLOP_S, bytes_per_weight)
        assert cost.limit == limit
        assert cost.compute_s / cost.memory_s == pytest.approx(tokens / ridge)


# --- the cache


def test_what_fits_beside_the_weights() -> None:
    assert theory.cache_capacity_tokens(100, 40, 7) == 8
    assert theory.batch_capacity(100, 40, 7, tokens_per_sequence=3) == 2
    assert theory.batch_capacity(100, 40, 7, tokens_per_sequence=9) == 0
    assert theory.batch_capacity(30, 40, 7, tokens_per_sequence=1) == 0


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(1, 1), (1, 7), (5, 1), (5, 7)])
def test_tokens_of_every_pass(prompt_tokens: int, new_tokens: int) -> None:
    cached, uncached, held = 0, 0, 0
    for step in range(new_tokens):
        text = prompt_tokens + step
        cached += text - held
        uncached += text
        held = text
    assert theory.tokens_processed(prompt_tokens, new_tokens, is_cached=True) == cached
    assert theory.tokens_processed(prompt_tokens, new_tokens, is_cached=False) == uncached


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.equal_cache_tokens(1, 0), "kv_bytes_per_token=0"),
        (lambda: theory.cache_capacity_tokens(1, 1, 0), "kv_bytes_per_token=0"),
        (lambda: theory.batch_capacity(1, 1, 1, 0), "tokens_per_sequence=0"),
        (lambda: theory.tokens_processed(0, 1, is_cached=True), "prompt_tokens=0"),
        (lambda: theory.tokens_processed(1, 0, is_cached=False), "new_tokens=0"),
        (lambda: theory.request_time(1.0, 1.0, 0), "new_tokens=0"),
        (lambda: theory.predicted_request(SMALL, UNIT, 0, 1), "prompt_tokens=0"),
        (lambda: theory.pass_table(SMALL, UNIT, 0), "max_tokens=0"),
    ],
)
def test_numbers_that_make_no_sense_are_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a number above 0$"):
        call()


# --- requests


def test_a_request_is_ttft_and_the_other_tokens() -> None:
    assert theory.request_time(2.0, 0.5, 5) == RequestTime(prefill_s=2.0, decode_s=2.0)
    assert theory.request_time(2.0, 0.5, 5).total_s == 4.0
    assert theory.request_time(2.0, 0.5, 5).prefill_frac == 0.5
    assert theory.request_time(2.0, 0.5, 1) == RequestTime(2.0, 0.0)


def test_a_predicted_request_is_its_passes() -> None:
    fast = Ceilings(1e-9, math.inf)  # reading alone
    found = theory.predicted_request(SMALL, fast, prompt_tokens=4, new_tokens=3)
    assert found.prefill_s == pytest.approx(1000 + 3 * 8 + 2 * (4 + 4))
    assert found.decode_s == pytest.approx((1000 + 2 * (5 + 1)) + (1000 + 2 * (6 + 1)))


def test_short_questions_write_and_long_documents_read() -> None:
    shares = [
        theory.predicted_request(EIGHT_B, SUSTAINED, prompt_tokens, new_tokens).prefill_frac
        for prompt_tokens, new_tokens in ((100, 500), (8000, 200), (100_000, 50))
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    # Weights alone: 3.81 s of arithmetic against 49 readings of 4.78 ms.
    assert shares[-1] == pytest.approx(3.8095 / (3.8095 + 49 * 0.0047761), rel=1e-4)


# --- prefill


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 1000])
def test_the_prefill_curve_is_the_prompt_passes_arithmetic(tokens: int) -> None:
    curve = theory.prefill_curve(SMALL, UNIT)
    assert curve.seconds(tokens) == pytest.approx(SMALL.operations(theory.prompt_pass(tokens)), rel=1e-12)


def test_the_parts_of_the_prefill_curve() -> None:
    curve = theory.prefill_curve(SMALL, UNIT)
    assert curve.fixed_s == pytest.approx(2 * 70)
    assert curve.linear_s == pytest.approx(2 * 300 + 2 * 5)
    assert curve.quadratic_s == pytest.approx(2 * 5)
    assert curve.equal_tokens == pytest.approx(61)
    assert curve.quadratic_frac(61) == pytest.approx(37_210 / (2 * 37_210 + 140))
    assert theory.prefill_curve(EIGHT_B, UNIT).equal_tokens == math.inf


def test_a_fit_finds_the_curve_that_made_the_times() -> None:
    curve = PrefillCurve(1e-3, 1.4e-5, 2.6e-10)
    lengths = [16, 64, 256, 1024, 8192]
    fitted = theory.fit_prefill(lengths, [curve.seconds(tokens) for tokens in lengths])
    assert fitted.fixed_s == pytest.approx(curve.fixed_s, rel=1e-9)
    assert fitted.linear_s == pytest.approx(curve.linear_s, rel=1e-9)
    assert fitted.quadratic_s == pytest.approx(curve.quadratic_s, rel=1e-9)


def test_a_fit_has_no_negative_part() -> None:
    fitted = theory.fit_prefill([16, 64, 256, 1024], [0.4, 0.8, 1.6, 3.2])  # a root: concave
    assert fitted.quadratic_s == 0
    assert fitted.linear_s > 0
    assert fitted.fixed_s > 0


@pytest.mark.parametrize(
    ("tokens", "seconds"), [([1, 2], [1, 2]), ([1, 2, 2], [1, 2, 2]), ([1, 2, 3], [1, 2])]
)
def test_a_fit_of_too_little_is_refused(tokens: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="expected at least three lengths, each with its time"):
        theory.fit_prefill(tokens, seconds)


# --- speculation


def test_a_table_of_passes_is_of_new_tokens_after_a_context() -> None:
    table = theory.pass_table(SMALL, UNIT, 3, context_tokens=10)
    assert table == tuple(
        theory.cost_of(theory.verify_pass(count, 10 + count), SMALL, UNIT).seconds for count in (1, 2, 3)
    )
    assert theory.pass_table(EIGHT_B, PEAK, 200)[-1] == pytest.approx(floor_ms(EIGHT_B, PEAK) / 1e3)


def test_break_even_is_the_one_of_the_measured_prediction() -> None:
    costs = PassCosts((4.0, 4.0, 5.0), {"lookup": (0.0,), "model": (0.0, 1.0, 2.0)})
    assert theory.break_even(costs, 2, "lookup") == break_even_acceptance(2, 0.0, 5 / 4)
    assert theory.break_even(costs, 2, "model") == break_even_acceptance(2, 1 / 4, 5 / 4)
    # 1 + a tokens for 5/4 of a step.
    assert theory.break_even(costs, 1, "model") == pytest.approx(0.25)


def test_drafts_that_cost_a_pass_each_never_pay() -> None:
    costs = PassCosts((1.0, 1.0), {"model": (0.0, 1.5)})
    assert theory.break_even(costs, 1, "model") is None
