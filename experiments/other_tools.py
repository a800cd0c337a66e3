"""What other benchmarks would report for the same run: their definitions, applied to our events.

The tools watch a stream of chunks over HTTP; here a commit of n tokens arrives as one chunk, at the moment when the
host learned them, and a request is sent at the start of its trace: waiting for a slot is in every latency. The traces
of an arm are laid end to end, as if the tool had sent a trace's requests together and the next trace's when those were
done; the time between them, in which other arms ran, is nobody's. Network, server and detokenization are not in our
events. Keys are the tools' own: the path inside the tool's JSON report, with its units.

Token counts are exact here; tools that count tokens by tokenizing the text again (AIPerf and inference-perf, unless
told to use the server's count) may differ. Left out: rates that count prompt tokens or requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from experiments import metrics
from experiments.trace import RequestTimeline, Trace, timelines

_Values = TypeVar("_Values")


@dataclass(frozen=True)
class _Request:
    """A request as its client sees it: sent at `sent_s`, answered in chunks of 1 or more tokens."""

    sent_s: float
    chunk_times_s: tuple[float, ...]
    chunk_sizes: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_sizes)

    @property
    def ttft_s(self) -> float:
        return self.chunk_times_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.chunk_times_s[-1] - self.sent_s

    @property
    def decode_s(self) -> float:
        return self.chunk_times_s[-1] - self.chunk_times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]


@dataclass(frozen=True)
class _Run:
    """One or more requests, and the time from the start of the first trace to the end of the last one."""

    requests: tuple[_Request, ...]
    duration_s: float

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def answered_s(self) -> float:
        """From the first request sent to the last chunk of any."""
        last_s = max(request.chunk_times_s[-1] for request in self.requests)
        return last_s - min(request.sent_s for request in self.requests)


def as_reported_by(tool: str, traces: Sequence[Trace]) -> dict[str, float]:
    """The figures that `tool` (one of KNOWN_TOOLS) would report for the traces of one arm; none without requests.

    A figure that a tool doesn't report for such a run (say, its TPOT when each answer is one token) is left out where
    the tool leaves it out, and 0 where the tool writes 0. Percentiles are there whatever the number of samples.
    """
    if tool not in _TOOLS:
        raise ValueError(f"unknown tool {tool!r}; known: {', '.join(KNOWN_TOOLS)}")
    run = _end_to_end(traces)
    return _TOOLS[tool](run) if run.requests else {}


def differences_table(traces: Sequence[Trace]) -> str:
    """A Markdown table of the figures that go by the same name in several tools, for one arm's traces.

    A tool's cell has its own definition; `-` where it has no such figure.
    """
    rows = [(tool, _shared_figures(tool, as_reported_by(tool, traces))) for tool in KNOWN_TOOLS]
    rows.append(("twospeed", _our_figures(traces)))
    lines = [("tool", *_SHARED), ("---", *["---:"] * len(_SHARED))]
    lines += [(name, *map(_cell, figures)) for name, figures in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# --- the tools


def _vllm(run: _Run) -> dict[str, float]:
    """vLLM, `vllm bench serve` with its default backend, /v1/completions.

    Source: vllm/benchmarks/serve.py (calculate_metrics, benchmark) at 009e6d4a and
    vllm/benchmarks/lib/endpoint_request_func.py (async_request_openai_completions) at 02cfb534.
    A chunk is one ITL sample, whatever its size. TPOT is the time after the first chunk over N - 1 tokens, of requests
    with N > 1. The peak counts chunks, not tokens, by the second. No samples give 0. `e2el` needs
    `--percentile-metrics`; percentiles interpolate; the default one is the 99th.
    """
    gaps = [request.gaps_s for request in run.requests]
    return {
        **_serving_throughput(run, gaps),
        **_serving_stats("ttft", [request.ttft_s for request in run.requests], 99),
        **_serving_stats("tpot", _tpot_s(run), 99),
        **_serving_stats("itl", [gap for of_request in gaps for gap in of_request], 99),
        **_serving_stats("e2el", [request.latency_s for request in run.requests], 99),
    }


def _sglang(run: _Run) -> dict[str, float]:
    """SGLang, `python -m sglang.bench_serving` with its own backend, /generate.

    Source: python/sglang/benchmark/serving.py (async_request_sglang_generate, calculate_metrics, benchmark) at
    00f9ec47; its older place, python/sglang/bench_serving.py at 0033168f, shares gaps the same way.
    A gap is shared by its chunk's tokens: gap / n, n times. All else is as in vLLM, except that the peak counts those
    shares, so tokens (but the first chunk as one). Its OpenAI backends take a chunk as one sample, unless the server
    reports an accept length. `max_itl_ms` is printed only.
    """
    shares = [_shared_gaps_s(request) for request in run.requests]
    itl = [share for of_request in shares for share in of_request]
    return {
        **_serving_throughput(run, shares),
        **_serving_stats("ttft", [request.ttft_s for request in run.requests], 90, 95, 99),
        **_serving_stats("tpot", _tpot_s(run), 90, 95, 99),
        **_serving_stats("itl", itl, 90, 95, 99),
        "max_itl_ms": max(itl, default=0.0) * 1e3,
        **_serving_stats("e2e_latency", [request.latency_s for request in run.requests], 90, 95, 99),
    }


def _aiperf(run: _Run) -> dict[str, float]:
    """NVIDIA AIPerf, streaming, without --per-chunk-usage.

    Source: docs/metrics-reference.md at 0176f594 and src/aiperf/metrics/: types/inter_token_latency_metric.py at
    58dd5dea, types/inter_chunk_latency_metric.py and types/ttft_metric.py at 58028d5b, metric_dicts.py at 0fec57a6.
    ITL is one value per request, over N - 1 tokens, of requests with N > 1: the others' TPOT. The gaps between chunks
    are `inter_chunk_latency`, pooled; its percentiles are estimates of a sketch and left out here. Throughput is over
    the time from the first request sent to the last chunk. A rate per user needs a chunk after the first.
    """
    requests = run.requests
    distributions = {
        "time_to_first_token": _ms(request.ttft_s for request in requests),
        "time_to_second_token": _ms(request.gaps_s[0] for request in requests if request.gaps_s),
        "request_latency": _ms(request.latency_s for request in requests),
        "inter_token_latency": _ms(_tpot_s(run)),
        "output_token_throughput_per_user": [1 / tpot for tpot in _tpot_s(run) if tpot],
        "e2e_output_token_throughput": [request.num_tokens / request.latency_s for request in requests],
    }
    gaps = _ms(gap for request in requests for gap in request.gaps_s)
    return {
        **_each(_aiperf_stats, distributions),
        **_stats("inter_chunk_latency", gaps, mean="avg"),
        "output_token_throughput.avg": run.num_tokens / run.answered_s,
        "request_throughput.avg": len(requests) / run.answered_s,
        "benchmark_duration.avg": run.answered_s,
    }


def _guidellm(run: _Run) -> dict[str, float]:
    """GuideLLM, streaming, without warm-up and cool-down; keys are below `metrics` of a benchmark in its report.

    Source: src/guidellm/benchmark/schemas/metrics.py (GenerativeMetrics.compile) at 1a145a40, and under
    src/guidellm/schemas/base/: request_stats.py at 31c74ea2, statistics.py (DistributionSummary) at 02804675.
    TPOT is the whole latency over N tokens: the wait for the first one is in it. ITL is one value per request, over
    N - 1. In their distributions a request weighs N, and N - 1. A percentile is the smallest sample that reaches it;
    nothing is interpolated, and the median is one of them. Rates are means over the time from the first request sent
    to the last answer, but for times less than 0.1 ms apart, which it merges. Until pull request 1079 (September 2026)
    the rate of output tokens was over the time from the first chunk on, which made it higher.
    """
    requests = run.requests
    sizes = [request.num_tokens for request in requests]
    alike = [1] * len(requests)
    distributions = {
        "request_latency": ([request.latency_s for request in requests], alike),
        "time_to_first_token_ms": (_ms(request.ttft_s for request in requests), alike),
        "time_per_output_token_ms": (_ms(_normalized_tpot_s(run)), sizes),
        "inter_token_latency_ms": (
            _ms(request.decode_s / max(request.num_tokens - 1, 1) for request in requests),
            [size - 1 for size in sizes],
        ),
    }
    return {
        **_each(_guidellm_stats, distributions),
        "output_tokens_per_second.successful.mean": run.num_tokens / run.answered_s,
        "requests_per_second.successful.mean": len(requests) / run.answered_s,
    }


def _inference_perf(run: _Run) -> dict[str, float]:
    """inference-perf (kubernetes-sigs), streaming; all latencies in seconds.

    Source: inference_perf/reportgen/base.py (correct_streamed_response_metrics, compute_request_latency_metrics,
    summarize_requests) at 010d12fb.
    Each token has its chunk's time: of a chunk of n tokens one ITL sample is the gap, n - 1 are 0. TPOT is the time
    after the first token over N - 1. A request with one token has neither, nor a TTFT. Normalized TPOT is the whole
    latency over N. Throughput is over the time from the first request sent to the last answer; percentiles interpolate.
    """
    streamed = [request for request in run.requests if request.num_tokens > 1]
    distributions = {
        "request_latency": [request.latency_s for request in run.requests],
        "normalized_time_per_output_token": _normalized_tpot_s(run),
        "time_per_output_token": _tpot_s(run),
        "time_to_first_token": [request.ttft_s for request in streamed],
        "inter_token_latency": [gap for request in streamed for gap in _token_gaps_s(request)],
    }
    return {
        **_each(_inference_perf_stats, distributions),
        "successes.throughput.output_tokens_per_sec": run.num_tokens / run.answered_s,
        "successes.throughput.requests_per_sec": len(run.requests) / run.answered_s,
        "benchmark_time_seconds": run.answered_s,
    }


_TOOLS: dict[str, Callable[[_Run], dict[str, float]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
    "inference-perf": _inference_perf,
}
KNOWN_TOOLS = tuple(_TOOLS)


# --- a run as its client sees it


def _end_to_end(traces: Sequence[Trace]) -> _Run:
    requests: list[_Request] = []
    elapsed_s = 0.0
    for trace in traces:
        requests += [_sent(timeline, elapsed_s - trace.start_s) for timeline in timelines(trace)]
        elapsed_s += trace.end_s - trace.start_s
    return _Run(tuple(requests), elapsed_s)


def _sent(timeline: RequestTimeline, shift_s: float) -> _Request:
    return _Request(
        sent_s=timeline.admitted_s - timeline.queued_s + shift_s,
        chunk_times_s=tuple(time_s + shift_s for time_s in timeline.commit_times_s),
        chunk_sizes=timeline.commit_sizes,
    )


# --- what a chunk of several tokens counts as


def _tpot_s(run: _Run) -> list[float]:
    """The time after the first chunk over N - 1 tokens, though the first chunk may have brought several."""
    return [request.decode_s / (request.num_tokens - 1) for request in run.requests if request.num_tokens > 1]


def _normalized_tpot_s(run: _Run) -> list[float]:
    """The whole latency over N tokens: the wait for the first one is in it."""
    return [request.latency_s / request.num_tokens for request in run.requests]


def _shared_gaps_s(request: _Request) -> list[float]:
    pairs = zip(request.gaps_s, request.chunk_sizes[1:], strict=True)
    return [gap / size for gap, size in pairs for _ in range(size)]


def _token_gaps_s(request: _Request) -> list[float]:
    pairs = zip(request.chunk_times_s, request.chunk_sizes, strict=True)
    token_times = [time_s for time_s, size in pairs for _ in range(size)]
    return [later - earlier for earlier, later in pairwise(token_times)]


# --- statistics as the tools take them


def _ms(seconds: Iterable[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def _each(
    stats: Callable[[str, _Values], dict[str, float]], table: Mapping[str, _Values]
) -> dict[str, float]:
    return {key: figure for name, values in table.items() for key, figure in stats(name, values).items()}


def _stats(name: str, values: Sequence[float], mean: str = "mean", **percentiles: int) -> dict[str, float]:
    """Nothing for no values; percentiles interpolate."""
    if not values:
        return {}
    return {
        f"{name}.{mean}": float(np.mean(values)),
        f"{name}.min": min(values),
        f"{name}.max": max(values),
        **{f"{name}.{key}": float(np.percentile(values, percent)) for key, percent in percentiles.items()},
    }


def _aiperf_stats(name: str, values: Sequence[float]) -> dict[str, float]:
    return _stats(name, values, mean="avg", p50=50, p90=90, p95=95, p99=99)


def _inference_perf_stats(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return _stats(f"successes.latency.{name}", seconds, median=50, p90=90, p99=99)


def _guidellm_stats(name: str, weighted: tuple[Sequence[float], Sequence[int]]) -> dict[str, float]:
    """Values and their weights; 0 where all weights are. Equal values are one, of their summed weight."""
    values, weights = weighted
    name = f"{name}.successful"
    keys = {"median": 0.5, "percentiles.p90": 0.9, "percentiles.p95": 0.95, "percentiles.p99": 0.99}
    if not any(weights):
        return dict.fromkeys((f"{name}.mean", *(f"{name}.{key}" for key in keys)), 0.0)
    samples, places = np.unique(values, return_inverse=True)
    counts = np.bincount(places, weights=weights)
    samples, shares = samples[counts > 0], counts[counts > 0] / counts.sum()
    reached = np.searchsorted(np.cumsum(shares), list(keys.values()))
    return {
        f"{name}.mean": float(np.sum(samples * shares)),
        **{f"{name}.{key}": float(samples[place]) for key, place in zip(keys, reached, strict=True)},
    }


def _serving_stats(name: str, seconds: Sequence[float], *percentiles: int) -> dict[str, float]:
    """vLLM's and SGLang's: in seconds first, then in milliseconds."""
    samples = seconds or [0.0]
    return {
        f"mean_{name}_ms": float(np.mean(samples)) * 1e3,
        f"median_{name}_ms": float(np.median(samples)) * 1e3,
        f"std_{name}_ms": float(np.std(samples)) * 1e3,
        **{f"p{percent}_{name}_ms": float(np.percentile(samples, percent)) * 1e3 for percent in percentiles},
    }


def _serving_throughput(run: _Run, itl_s: Sequence[Sequence[float]]) -> dict[str, float]:
    """vLLM's and SGLang's: over the whole run; the peak is that of the seconds since the first request was sent."""
    first_sent_s = min(request.sent_s for request in run.requests)
    arrivals_s = [
        time_s
        for request, gaps in zip(run.requests, itl_s, strict=True)
        for time_s in accumulate(gaps, initial=request.chunk_times_s[0])
    ]
    by_second = np.bincount([int(time_s - first_sent_s) for time_s in arrivals_s])
    return {
        "duration": run.duration_s,
        "request_throughput": len(run.requests) / run.duration_s,
        "output_throughput": run.num_tokens / run.duration_s,
        "max_output_tokens_per_s": float(by_second.max()),
    }


# --- the figures of one name

_SHARED = (
    "TTFT mean, ms",
    *(f"TPOT {stat}, ms" for stat in ("mean", "median", "p99")),
    "ITL mean, ms",
    "output tokens / s",
)
_SERVING_KEYS = (
    "mean_ttft_ms",
    *(f"{stat}_tpot_ms" for stat in ("mean", "median", "p99")),
    "mean_itl_ms",
    "output_throughput",
)
_SHARED_KEYS = {
    "vllm": _SERVING_KEYS,
    "sglang": _SERVING_KEYS,
    "aiperf": (
        "time_to_first_token.avg",
        *("", "", ""),
        "inter_token_latency.avg",
        "output_token_throughput.avg",
    ),
    "guidellm": (
        "time_to_first_token_ms.successful.mean",
        *(f"time_per_output_token_ms.successful.{stat}" for stat in ("mean", "median", "percentiles.p99")),
        "inter_token_latency_ms.successful.mean",
        "output_tokens_per_second.successful.mean",
    ),
    "inference-perf": (
        "successes.latency.time_to_first_token.mean",
        *(f"successes.latency.time_per_output_token.{stat}" for stat in ("mean", "median", "p99")),
        "successes.latency.inter_token_latency.mean",
        "successes.throughput.output_tokens_per_sec",
    ),
}


def _shared_figures(tool: str, reported: dict[str, float]) -> list[float | None]:
    """In the table's units: inference-perf's latencies are in seconds."""
    *latencies, rate = map(reported.get, _SHARED_KEYS[tool])
    to_ms = 1e3 if tool == "inference-perf" else 1.0
    return [*(None if value is None else to_ms * value for value in latencies), rate]


def _our_figures(traces: Sequence[Trace]) -> list[float | None]:
    """TPOT has no p99 in twospeed; its rate is of all rows while decoding."""
    found = metrics.latency(traces) | metrics.throughput(traces)
    keys = ("latency/ttft_ms.mean", "latency/tpot_ms.mean", "latency/tpot_ms.p50", "", "latency/itl_ms.mean")
    return [found.get(key) for key in (*keys, "throughput/decode_tok_s_aggregate")]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
