"""python -m experiments.benchmarks.against_generate : our plain decoding beside transformers' `generate`.

Same model object, same prompts, greedy, batch 1, in one process; the two take turns in an order shuffled from the
seed. Prints the median TTFT and TPOT of each and the geometric mean of the paired TPOT ratios.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.progress import track
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from experiments import plugins
from experiments.config import ModelConfig
from experiments.environment import default_threads
from experiments.measure import measure, no_garbage_collection
from experiments.metrics import request_metrics
from experiments.models import ModelPool, resolve_device, resolve_dtype, torch_dtype
from experiments.statistics import MIN_NEW_TOKENS, Ratio
from experiments.strategy import Arm, EngineSettings, build_decoder
from experiments.trace import RequestTimeline, timelines
from experiments.workloads.base import WorkloadContext, encode
from specdec.decoding.base import Decoder
from specdec.generation import end_of_text_ids
from specdec.progress import StopTokens
from specdec.types import Request, SamplingParams

Decode = Callable[[Request], RequestTimeline]
OURS, THEIRS = "twospeed", "generate"


class _Stopwatch(BaseStreamer):
    """Notes when each token of `generate` arrives; its first call is the prompt's."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times_s.append(time.perf_counter())
            self.tokens.extend(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def by_generate(model: PreTrainedModel) -> Decode:
    """Decode one request with transformers' own greedy `generate`."""

    def decode(request: Request) -> RequestTimeline:
        prompt = torch.tensor([request.prompt_ids], device=model.device)
        stopwatch = _Stopwatch()
        with no_garbage_collection():
            start_s = time.perf_counter()
            model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                streamer=stopwatch,
            )
        sizes = (1,) * len(stopwatch.tokens)
        times = tuple(stopwatch.times_s)
        return RequestTimeline(request.request_id, 0, 0.0, start_s, times, sizes, tuple(stopwatch.tokens))

    return decode


def by_our_decoder(decoder: Decoder) -> Decode:
    """Decode one request with the engine."""

    def decode(request: Request) -> RequestTimeline:
        (trace,) = measure({OURS: decoder}, [[request]], warmup=0)
        (timeline,) = timelines(trace)
        return timeline

    return decode


def main() -> int:
    options = _parse()
    plugins.register_all()
    torch.set_num_threads(options.threads)
    device = resolve_device("auto")
    dtype = resolve_dtype(options.dtype, device)
    pool = ModelPool(ModelConfig(target=options.model), torch_dtype(dtype), device)
    plain = plugins.default_options("weights", "plain")
    model = pool.target(plain)
    requests = _requests(pool, options.limit, options.max_new_tokens)
    arm = Arm(
        OURS,
        plain,
        plugins.default_options("kv", "dense"),
        plugins.default_options("decoding", "autoregressive"),
    )
    stop_ids = end_of_text_ids(model)
    capacity = max(request.max_length for request in requests)
    settings = EngineSettings(1, capacity, SamplingParams(), stop_ids, 0, StopTokens(stop_ids), None)
    arms = {OURS: by_our_decoder(build_decoder(arm, pool, settings)), THEIRS: by_generate(model)}
    print(f"{options.model}, {device.type}, {dtype}, {options.threads} threads, {len(requests)} prompts")
    _report(_take_turns(arms, requests, options.repeats, options.seed))
    return 0


def _take_turns(
    arms: dict[str, Decode], requests: Sequence[Request], repeats: int, seed: int
) -> dict[str, list[RequestTimeline]]:
    for decode in arms.values():
        decode(requests[0])  # first-use costs
    found: dict[str, list[RequestTimeline]] = {name: [] for name in arms}
    order = random.Random(seed)
    for request in track(list(requests) * repeats, description="measuring", transient=True):
        for name in order.sample(sorted(arms), len(arms)):
            found[name].append(arms[name](request))
    return found


def _report(found: dict[str, list[RequestTimeline]]) -> None:
    for name, timelines_ in found.items():
        metrics = [request_metrics(timeline) for timeline in timelines_]
        ttft = torch.tensor([m.ttft_ms for m in metrics]).median()
        tpot = torch.tensor([m.tpot_ms for m in metrics if m.tpot_ms is not None]).median()
        print(f"{name:9} median TPOT {tpot:6.2f} ms, median TTFT {ttft:7.1f} ms")
    ratios = [
        theirs / ours
        for a, b in zip(found[OURS], found[THEIRS], strict=True)
        if min(a.num_tokens, b.num_tokens) >= MIN_NEW_TOKENS
        and (ours := request_metrics(a).tpot_ms)
        and (theirs := request_metrics(b).tpot_ms)
    ]
    same = sum(a.token_ids == b.token_ids for a, b in zip(found[OURS], found[THEIRS], strict=True))
    ratio = Ratio.of(ratios)
    if ratio is not None and ratio.ci_low is not None:
        print(
            f"TPOT of generate / ours: {ratio.value:.3f} [{ratio.ci_low:.3f}, {ratio.ci_high:.3f}] "
            f"over {ratio.num_pairs} pairs; {same} of {len(found[OURS])} texts equal"
        )


def _requests(pool: ModelPool, limit: int, max_new_tokens: int) -> list[Request]:
    workload = plugins.default_options("workload", "embedded")
    workload.limit = limit
    prompts = workload.load(WorkloadContext(pool.target_config.vocab_size, 0))
    return [Request(i, tuple(encode(p, pool.tokenizer)), max_new_tokens) for i, p in enumerate(prompts)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--limit", type=int, default=12, help="prompts of the embedded workload")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
