"""Other benchmarks' figures for traces written by hand. Times are binary fractions: most expected values are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from toy_traces import step, trace

from experiments.other_tools import KNOWN_TOOLS, as_reported_by, differences_table
from experiments.trace import Trace


def stream(
    times: Sequence[float], sizes: Sequence[int], *, start_s: float = 0.0, queued_s: float = 0.0
) -> Trace:
    """One request, sent at `start_s` and admitted `queued_s` later, whose commits of `sizes` end at `times`."""
    starts = [start_s + queued_s, *times]
    phases = ["prefill", *["verify"] * len(times)]
    events = zip(starts, times, phases, sizes, strict=False)
    return trace(*(step(a, b, phase, {0: [7] * size}) for a, b, phase, size in events), start_s=start_s)


def speculative() -> Trace:
    """Commits of 1, 3, 1 and 4 tokens: 9. Seconds since it was sent:

    admitted 0.5, first chunk 1.0, others 1.75, 2.0 and 2.5 (gaps 0.75, 0.25, 0.5: 1.5 in all), generator ends 3.0.
    """
    found = stream([5.0, 5.75, 6.0, 6.5], [1, 3, 1, 4], start_s=4.0, queued_s=0.5)
    return replace(found, end_s=7.0)


# --- one speculative request


def test_vllm_takes_a_chunk_as_one_gap() -> None:
    found = as_reported_by("vllm", [speculative()])
    assert found.pop("std_itl_ms") == pytest.approx(1000 * (0.125 / 3) ** 0.5)
    assert found.pop("p99_itl_ms") == pytest.approx(745.0)  # 0.98 of the way from 500 to 750
    assert found == {
        "duration": 3.0,
        "request_throughput": 1 / 3,
        "output_throughput": 3.0,
        "max_output_tokens_per_s": 2.0,  # 2 chunks in the second from 1.0 on, 2 in the one from 2.0 on
        "mean_ttft_ms": 1000.0,
        "median_ttft_ms": 1000.0,
        "std_ttft_ms": 0.0,
        "p99_ttft_ms": 1000.0,
        "mean_tpot_ms": 187.5,  # 1500 / 8
        "median_tpot_ms": 187.5,
        "std_tpot_ms": 0.0,
        "p99_tpot_ms": 187.5,
        "mean_itl_ms": 500.0,  # 1500 / 3
        "median_itl_ms": 500.0,
        "mean_e2el_ms": 2500.0,
        "median_e2el_ms": 2500.0,
        "std_e2el_ms": 0.0,
        "p99_e2el_ms": 2500.0,
    }


def test_sglang_shares_a_gap_among_its_tokens() -> None:
    found = as_reported_by("sglang", [speculative()])
    # 250 three times, 250 once, 125 four times
    assert {name: value for name, value in found.items() if "itl" in name} == {
        "mean_itl_ms": 187.5,
        "median_itl_ms": 187.5,
        "std_itl_ms": 62.5,
        "p90_itl_ms": 250.0,
        "p95_itl_ms": 250.0,
        "p99_itl_ms": 250.0,
        "max_itl_ms": 250.0,
    }
    assert found["mean_ttft_ms"] == found["p95_ttft_ms"] == 1000.0
    assert found["mean_tpot_ms"] == found["p90_tpot_ms"] == 187.5
    assert found["mean_e2e_latency_ms"] == found["p99_e2e_latency_ms"] == 2500.0
    assert (found["duration"], found["output_throughput"], found["request_throughput"]) == (3.0, 3.0, 1 / 3)
    assert found["max_output_tokens_per_s"] == 5.0  # at 2.0, 2.125, 2.25, 2.375 and 2.5


def test_aiperf_has_one_inter_token_latency_per_request() -> None:
    found = as_reported_by("aiperf", [speculative()])
    alike = {
        "time_to_first_token": 1000.0,
        "time_to_second_token": 750.0,
        "request_latency": 2500.0,
        "inter_token_latency": 187.5,
        "output_token_throughput_per_user": 1 / 0.1875,
        "e2e_output_token_throughput": 9 / 2.5,
    }
    expected = {
        f"{name}.{stat}": value
        for name, value in alike.items()
        for stat in ("avg", "min", "max", "p50", "p90", "p95", "p99")
    }
    assert found == expected | {
        "inter_chunk_latency.avg": 500.0,
        "inter_chunk_latency.min": 250.0,
        "inter_chunk_latency.max": 750.0,
        "output_token_throughput.avg": 9 / 2.5,
        "request_throughput.avg": 1 / 2.5,
        "benchmark_duration.avg": 2.5,
    }


def test_guidellm_has_the_first_token_in_tpot() -> None:
    found = as_reported_by("guidellm", [speculative()])
    alike = {
        "request_latency": 2.5,
        "time_to_first_token_ms": 1000.0,
        "time_per_output_token_ms": 1e3 * (2.5 / 9),
        "inter_token_latency_ms": 187.5,
    }
    stats = ("mean", "median", "percentiles.p90", "percentiles.p95", "percentiles.p99")
    expected = {f"{name}.successful.{stat}": value for name, value in alike.items() for stat in stats}
    assert found == expected | {
        "output_tokens_per_second.successful.mean": 9 / 2.5,
        "requests_per_second.successful.mean": 1 / 2.5,
    }


def test_inference_perf_gives_each_token_its_chunks_time() -> None:
    found = as_reported_by("inference-perf", [speculative()])
    gaps = {name.rpartition(".")[2]: value for name, value in found.items() if "inter_token" in name}
    # 0.75, 0, 0, then 0.25, then 0.5, 0, 0, 0
    assert gaps.pop("p90") == pytest.approx(0.575)  # 0.3 of the way from 0.5 to 0.75
    assert gaps.pop("p99") == pytest.approx(0.7325)
    assert gaps == {"mean": 0.1875, "min": 0.0, "max": 0.75, "median": 0.0}
    for stat in ("mean", "min", "max", "median", "p90", "p99"):
        assert found[f"successes.latency.request_latency.{stat}"] == 2.5
        assert found[f"successes.latency.normalized_time_per_output_token.{stat}"] == 2.5 / 9
        assert found[f"successes.latency.time_per_output_token.{stat}"] == 0.1875
        assert found[f"successes.latency.time_to_first_token.{stat}"] == 1.0
    assert found["successes.throughput.output_tokens_per_sec"] == 9 / 2.5
    assert found["successes.throughput.requests_per_sec"] == 1 / 2.5
    assert found["benchmark_time_seconds"] == 2.5
    assert len(found) == 5 * 6 + 3


def test_the_table_has_a_row_per_tool_and_ours() -> None:
    """Ours: TTFT from admission; no p99 of TPOT; the rate is 8 tokens in the 1.5 s of decoding."""
    assert differences_table([speculative()]).splitlines() == [
        "| tool | TTFT mean, ms | TPOT mean, ms | TPOT median, ms | TPOT p99, ms | ITL mean, ms | output tokens / s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| vllm | 1000.0 | 187.5 | 187.5 | 187.5 | 500.0 | 3.0 |",
        "| sglang | 1000.0 | 187.5 | 187.5 | 187.5 | 187.5 | 3.0 |",
        "| aiperf | 1000.0 | - | - | - | 187.5 | 3.6 |",
        "| guidellm | 1000.0 | 277.8 | 277.8 | 277.8 | 187.5 | 3.6 |",
        "| inference-perf | 1000.0 | 187.5 | 187.5 | 187.5 | 187.5 | 3.6 |",
        "| twospeed | 500.0 | 187.5 | 187.5 | - | 187.5 | 5.3 |",
    ]


# --- edges


def test_one_token_per_commit_is_where_the_tools_agree() -> None:
    plain = [stream([1.0, 1.25, 1.5, 2.0, 2.25], [1] * 5)]
    assert as_reported_by("vllm", plain)["mean_itl_ms"] == 312.5
    assert as_reported_by("sglang", plain)["mean_itl_ms"] == 312.5
    assert as_reported_by("aiperf", plain)["inter_token_latency.avg"] == 312.5
    assert as_reported_by("guidellm", plain)["inter_token_latency_ms.successful.mean"] == 312.5
    assert as_reported_by("inference-perf", plain)["successes.latency.inter_token_latency.mean"] == 0.3125


def test_a_first_chunk_of_several_tokens_counts_as_one_in_tpot() -> None:
    """2 tokens at 1.0, 2 at 2.5: 1.5 s over 3, though 2 were written in it (which is what twospeed divides by)."""
    found = [stream([1.0, 2.5], [2, 2])]
    assert as_reported_by("vllm", found)["mean_tpot_ms"] == 500.0
    assert as_reported_by("sglang", found)["mean_tpot_ms"] == 500.0
    assert as_reported_by("sglang", found)["mean_itl_ms"] == 750.0
    assert as_reported_by("aiperf", found)["inter_token_latency.avg"] == 500.0
    assert as_reported_by("guidellm", found)["inter_token_latency_ms.successful.mean"] == 500.0
    reported = as_reported_by("inference-perf", found)
    assert reported["successes.latency.time_per_output_token.mean"] == 0.5
    assert reported["successes.latency.inter_token_latency.max"] == 1.5  # and 0, 0
    assert differences_table(found).splitlines()[-1].startswith("| twospeed | 1000.0 | 750.0 | 750.0 |")


def test_an_answer_of_one_token() -> None:
    single = [stream([2.0], [1])]
    for tool in ("vllm", "sglang"):
        found = as_reported_by(tool, single)
        assert (found["mean_ttft_ms"], found["output_throughput"]) == (2000.0, 0.5)
        assert (
            found["mean_tpot_ms"]
            == found["p99_tpot_ms"]
            == found["mean_itl_ms"]
            == found["p99_itl_ms"]
            == 0.0
        )
    aiperf = as_reported_by("aiperf", single)
    assert aiperf["time_to_first_token.avg"] == 2000.0
    for missing in ("time_to_second", "inter_token", "inter_chunk", "output_token_throughput_per_user"):
        assert not [name for name in aiperf if name.startswith(missing)]
    guidellm = as_reported_by("guidellm", single)
    assert guidellm["time_per_output_token_ms.successful.mean"] == 2000.0
    assert guidellm["inter_token_latency_ms.successful.median"] == 0.0
    assert guidellm["output_tokens_per_second.successful.mean"] == 0.5
    inference_perf = as_reported_by("inference-perf", single)
    assert inference_perf["successes.latency.normalized_time_per_output_token.mean"] == 2.0
    for missing in ("time_to_first_token", "inter_token_latency", "latency.time_per_output_token"):
        assert not [name for name in inference_perf if missing in name]


def test_answers_of_one_token_are_not_in_tpot() -> None:
    both = [speculative(), stream([2.0], [1])]
    assert as_reported_by("vllm", both)["mean_tpot_ms"] == 187.5
    assert as_reported_by("sglang", both)["median_tpot_ms"] == 187.5
    assert as_reported_by("aiperf", both)["inter_token_latency.avg"] == 187.5
    assert as_reported_by("guidellm", both)["inter_token_latency_ms.successful.mean"] == 187.5
    inference_perf = as_reported_by("inference-perf", both)
    assert inference_perf["successes.latency.time_per_output_token.mean"] == 0.1875
    assert inference_perf["successes.latency.time_to_first_token.mean"] == 1.0
    assert as_reported_by("vllm", both)["mean_ttft_ms"] == 1500.0


def test_an_answer_in_one_chunk_has_a_tpot_of_zero() -> None:
    whole = [stream([2.0], [4])]
    assert as_reported_by("vllm", whole)["median_tpot_ms"] == 0.0
    aiperf = as_reported_by("aiperf", whole)
    assert aiperf["inter_token_latency.max"] == 0.0
    assert "output_token_throughput_per_user.avg" not in aiperf
    inference_perf = as_reported_by("inference-perf", whole)
    assert inference_perf["successes.latency.time_to_first_token.mean"] == 2.0
    assert inference_perf["successes.latency.inter_token_latency.max"] == 0.0


# --- several requests


def slow() -> Trace:
    """3 tokens, 1 by 1, at 2.0, 2.5 and 3.0 s."""
    return stream([102.0, 102.5, 103.0], [1, 1, 1], start_s=100.0)


def test_traces_are_laid_end_to_end() -> None:
    """The speculative one lasts 3 s, of which the last 0.5 s bring nothing; the slow one 3 s. 12 tokens."""
    for order in ([speculative(), slow()], [slow(), speculative()]):
        assert as_reported_by("vllm", order)["duration"] == 6.0
        assert as_reported_by("vllm", order)["output_throughput"] == 2.0
        assert as_reported_by("sglang", order)["output_throughput"] == 2.0
    found = [speculative(), slow()]
    assert as_reported_by("aiperf", found)["output_token_throughput.avg"] == 2.0
    assert as_reported_by("inference-perf", found)["successes.throughput.output_tokens_per_sec"] == 2.0
    assert as_reported_by("guidellm", found)["output_tokens_per_second.successful.mean"] == 2.0
    # the other way round the last answer is there before the end
    assert as_reported_by("aiperf", found[::-1])["benchmark_duration.avg"] == 5.5


def test_guidellm_weighs_a_request_by_its_tokens() -> None:
    found = as_reported_by("guidellm", [speculative(), slow()])
    # 187.5 weighs 8, 500 weighs 2
    assert found["inter_token_latency_ms.successful.mean"] == pytest.approx(250.0, rel=1e-15)
    assert found["inter_token_latency_ms.successful.median"] == 187.5
    assert found["inter_token_latency_ms.successful.percentiles.p90"] == 500.0
    # (9 tokens of 2500 / 9 + 3 tokens of 1000) / 12
    assert found["time_per_output_token_ms.successful.mean"] == pytest.approx(5500 / 12, rel=1e-15)
    # where the others weigh requests alike
    assert as_reported_by("vllm", [speculative(), slow()])["mean_tpot_ms"] == 343.75
    assert as_reported_by("aiperf", [speculative(), slow()])["inter_token_latency.avg"] == 343.75


def test_guidellm_interpolates_no_percentile() -> None:
    found = [stream([float(seconds)], [1]) for seconds in (1, 2, 3, 4)]
    assert as_reported_by("guidellm", found)["time_to_first_token_ms.successful.median"] == 2000.0
    assert as_reported_by("guidellm", found)["time_to_first_token_ms.successful.percentiles.p90"] == 4000.0
    assert as_reported_by("vllm", found)["median_ttft_ms"] == 2500.0
    assert as_reported_by("aiperf", found)["time_to_first_token.p50"] == 2500.0
    assert as_reported_by("sglang", found)["p90_ttft_ms"] == pytest.approx(3700.0)


def test_requests_of_a_trace_are_sent_together() -> None:
    """Request 1 waits for a slot until 2.0 s: its first token comes 3.0 s after it was sent."""
    waiting = trace(
        step(0.0, 1.0, "prefill", {0: [1]}),
        step(1.0, 2.0, "decode", {0: [2]}),
        step(2.0, 3.0, "prefill", {1: [3]}),
        step(3.0, 4.0, "decode", {1: [4]}),
    )
    assert as_reported_by("vllm", [waiting])["mean_ttft_ms"] == 2000.0
    assert as_reported_by("vllm", [waiting])["p99_e2el_ms"] == pytest.approx(3980.0)
    assert as_reported_by("aiperf", [waiting])["request_latency.max"] == 4000.0
    assert as_reported_by("guidellm", [waiting])["time_to_first_token_ms.successful.mean"] == 2000.0
    assert differences_table([waiting]).splitlines()[-1].startswith("| twospeed | 1000.0 |")


# --- the interface


def test_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown tool 'llmperf'; known: vllm, sglang, aiperf, guidellm, inference-perf"
    ):
        as_reported_by("llmperf", [speculative()])


@pytest.mark.parametrize("tool", KNOWN_TOOLS)
def test_no_requests_no_figures(tool: str) -> None:
    assert as_reported_by(tool, []) == {}
    assert as_reported_by(tool, [trace()]) == {}


@pytest.mark.parametrize("tool", KNOWN_TOOLS)
def test_figures_are_plain_floats(tool: str) -> None:
    found = as_reported_by(tool, [speculative(), slow()])
    assert found
    assert {type(value) for value in found.values()} == {float}


def test_a_table_of_nothing_has_no_figures() -> None:
    assert differences_table([]).splitlines()[2] == "| vllm | - | - | - | - | - | - |"
