"""One point of an experiment: prepare it (all checks that need no weights), then measure and compare it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from experiments import equivalence, plugins, statistics
from experiments.config import RunConfig
from experiments.environment import default_threads, quota_cores
from experiments.equivalence import Comparison
from experiments.load import ForeignLoad, LoadMeter
from experiments.measure import measure
from experiments.metrics import TARGET_PHASES, arm_metrics
from experiments.models import ModelPool, resolve_device, resolve_dtype, torch_dtype
from experiments.statistics import Ratio, Unit
from experiments.strategy import Arm, Arms, EngineSettings, arms_of, build_decoder, build_parts
from experiments.trace import RequestTimeline, Trace, timelines
from experiments.workloads.base import Prompt, WorkloadContext, encode
from quant.footprint import quantized_share, read_bytes_per_pass, stored_bytes
from specdec.decoding.base import Decoder
from specdec.generation import end_of_text_ids
from specdec.hf_adapter import check_supported
from specdec.progress import StopTokens
from specdec.types import Request, SamplingParams

MIB = 2**20


class UnfitPartsError(ValueError):
    """Parts don't fit together, as only loading them could tell; the message is the one line for the user."""


@dataclass(frozen=True)
class PreparedPoint:
    """A point that is ready to be measured; nothing heavy is loaded yet.

    `config` has every `auto` resolved. `requests` are in the order of `prompts`, their ids are indices.
    """

    config: RunConfig
    arms: Arms
    pool: ModelPool
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    tokenize_ms: float

    @property
    def blocks(self) -> list[Sequence[Request]]:
        """The requests in groups that are decoded together."""
        size = self.config.batch_size
        return [self.requests[start : start + size] for start in range(0, len(self.requests), size)]

    @property
    def capacity(self) -> int:
        return max(request.max_length for request in self.requests)

    @property
    def num_block_runs(self) -> int:
        """How many times a block is decoded by an arm."""
        return len(self.arms.distinct) * len(self.blocks) * self.config.measure.repeats

    @property
    def config_hash(self) -> str:
        return _hash(asdict(self.config))

    @property
    def workload_hash(self) -> str:
        return _hash([[request.prompt_ids, request.max_new_tokens] for request in self.requests])


def prepare(config: RunConfig) -> PreparedPoint:
    """Resolve and check a configuration.

    Raises ValueError or BundledModelError, in one line, for whatever can be known to be wrong before weights
    are loaded: names, files, vocabularies, model families, texts beyond the context.
    """
    if config.threads is not None and config.threads > quota_cores():
        raise ValueError(
            f"threads={config.threads}: expected at most {quota_cores()}, the cores this process may keep busy"
        )
    device = resolve_device(config.device)
    config = replace(
        config,
        device=device.type,
        dtype=resolve_dtype(config.dtype, device),
        threads=config.threads or default_threads(),
    )
    for part in (config.weights, config.kv, config.drafter, config.verifier, config.draft_length):
        if part is not None:
            plugins.check_choices(part)
    SamplingParams(config.sampling.temperature)  # refuses what would overflow
    pool = ModelPool(config.model, torch_dtype(config.dtype), device)
    if hasattr(config.drafter, "weights") and not config.drafter.weights:
        config = replace(config, drafter=replace(config.drafter, weights=pool.default_draft_weights))
    if pool.revision:  # a branch moves; the commit that was loaded does not
        config = replace(config, model=replace(config.model, revision=pool.revision))
    if pool.draft_revision:
        config = replace(config, model=replace(config.model, draft_revision=pool.draft_revision))
    prompts = config.workload.load(WorkloadContext(pool.target_config.vocab_size, config.seed))
    start_s = time.perf_counter()
    encoded = [encode(prompt, pool.tokenizer) for prompt in prompts]
    tokenize_ms = 1e3 * (time.perf_counter() - start_s) / len(prompts)
    requests = [
        Request(index, tuple(token_ids), config.workload.max_new_tokens)
        for index, token_ids in enumerate(encoded)
    ]
    _check_fits(pool, prompts, requests)
    return PreparedPoint(config, arms_of(config), pool, prompts, requests, tokenize_ms)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one arm. `weights_bytes` and `kv_allocated_bytes` include a draft model's; the cache's
    bytes per token are the target's and the draft model's apart."""

    weights_bytes: int
    weights_read_bytes: int
    kv_allocated_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    quantized_share: float


@dataclass(frozen=True)
class PointResult:
    """What a measured point showed. Speed-ups are None where the strategy is its own reference."""

    point: PreparedPoint
    traces: Sequence[Trace]
    footprints: dict[str, Footprint]
    foreign_load: ForeignLoad
    comparisons: Sequence[Comparison]
    seconds: dict[str, float]

    def traces_of(self, arm: Arm) -> list[Trace]:
        return [trace for trace in self.traces if trace.arm == arm.name]

    def timelines_of(self, arm: Arm) -> dict[Unit, RequestTimeline]:
        return statistics.by_unit([t for trace in self.traces_of(arm) for t in timelines(trace)])

    @cached_property
    def speedups(self) -> dict[str, Ratio | None]:
        """By metric name without the section: decode_vs_plain, decode_vs_twin, total_vs_plain, total_vs_twin."""
        arms, found = self.point.arms, {}
        for role, reference in (("plain", arms.plain), ("twin", arms.twin)):
            if reference.name != arms.strategy.name:
                ours, theirs = self.timelines_of(arms.strategy), self.timelines_of(reference)
                found[f"decode_vs_{role}"] = statistics.decode_speedup(ours, theirs)
                found[f"total_vs_{role}"] = statistics.total_speedup(ours, theirs)
        return found

    @property
    def equivalence(self) -> str:
        return equivalence.overall(self.comparisons)

    @property
    def lossless(self) -> bool:
        """Declared, and not contradicted by the comparison with the twin."""
        return self.point.arms.strategy.declares_lossless and self.equivalence != equivalence.DIVERGED

    @property
    def validity(self) -> str:
        """`noisy` where other processes took processor time while this was measured, else `ok`."""
        return "noisy" if self.foreign_load.is_noisy else "ok"

    @property
    def excluded(self) -> dict[Unit, str]:
        """Prompts that no speed-up is computed from, with the reason."""
        return statistics.excluded_units(*(self.timelines_of(arm) for arm in self.point.arms.distinct))

    def metrics_of(self, arm: Arm) -> dict[str, float]:
        """One arm's own metrics, memory included."""
        traces = self.traces_of(arm)
        return {**arm_metrics(traces), **_memory(self.footprints[arm.name], traces)}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Everything that is logged for the strategy, by contract name."""
        found = self.metrics_of(self.point.arms.strategy)
        found["latency/tokenize_ms.mean"] = self.point.tokenize_ms
        for name, ratio in self.speedups.items():
            if ratio is not None:
                found[f"speedup/{name}"] = ratio.value
                if ratio.ci_low is not None and ratio.ci_high is not None:
                    found[f"speedup/{name}.ci_low"] = ratio.ci_low
                    found[f"speedup/{name}.ci_high"] = ratio.ci_high
        return {**found, **equivalence.quality(self.comparisons)}


def measure_point(
    point: PreparedPoint,
    on_loaded: Callable[[dict[str, Footprint]], None] = lambda sizes: None,
    on_progress: Callable[[str], None] = lambda arm: None,
    on_measured: Callable[[Sequence[Trace]], None] = lambda traces: None,
) -> PointResult:
    """Load the models, measure all arms interleaved, and grade the strategy's output against its twin's.

    `on_loaded` gets the arms' footprints before anything is timed; `on_progress` is called after each block;
    `on_measured` gets the traces before outputs are compared, so that a failure there loses nothing measured.
    Raises UnfitPartsError where a weight format can't hold the model, or parts refuse each other.
    """
    config = point.config
    torch.set_num_threads(config.threads or 1)
    started_s = time.perf_counter()
    try:
        decoders = {arm.name: build_decoder(arm, point.pool, _settings(point)) for arm in point.arms.distinct}
    except ValueError as error:
        raise UnfitPartsError(str(error)) from error
    runners = {arm: _runners(decoder) for arm, decoder in decoders.items()}
    loaded_s = time.perf_counter()
    on_loaded({arm: _footprint(*found) for arm, found in runners.items()})
    load = LoadMeter()
    traces = measure(
        decoders,
        point.blocks,
        repeats=config.measure.repeats,
        warmup=config.measure.warmup,
        seed=config.seed,
        on_progress=on_progress,
    )
    measured_s, foreign_load = time.perf_counter(), load.read()
    on_measured(traces)
    # Again: some formats store their weights otherwise from the first forward on.
    footprints = {arm: _footprint(*found) for arm, found in runners.items()}
    comparisons = _compare(point, traces)
    seconds = {
        "load": loaded_s - started_s,
        "warm up and measure": measured_s - loaded_s,
        "compare outputs": time.perf_counter() - measured_s,
    }
    return PointResult(point, traces, footprints, foreign_load, comparisons, seconds)


def _settings(point: PreparedPoint) -> EngineSettings:
    config = point.config
    model = point.pool.target(point.arms.strategy.weights)
    return EngineSettings(
        num_slots=min(config.batch_size, len(point.requests)),
        capacity=point.capacity,
        temperature=config.sampling.temperature,
        seed=config.seed,
        stop_rule=StopTokens(end_of_text_ids(model)),
        prefill_chunk=config.prefill_chunk,
    )


def _check_fits(pool: ModelPool, prompts: Sequence[Prompt], requests: Sequence[Request]) -> None:
    """Can the target, and the draft model where there is one, hold the longest text?"""
    prompt, request = max(zip(prompts, requests, strict=True), key=lambda pair: pair[1].max_length)
    text = f"prompt {prompt.prompt_id}: {len(request.prompt_ids)} tokens + {request.max_new_tokens} new ones"
    for model, model_config in pool.configs.items():
        for what, num_tokens in ((model, 1), (f"{model}: {text}", request.max_length)):
            try:
                check_supported(model_config, num_tokens)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error


def _compare(point: PreparedPoint, traces: Sequence[Trace]) -> list[Comparison]:
    """Grades of every (repeat, block) against the twin; none when sampling, or for a strategy that is its twin."""
    arms = point.arms
    if point.config.sampling.temperature > 0 or arms.twin.name == arms.strategy.name:
        return []
    by_place = {(trace.arm, trace.repeat, trace.block): trace for trace in traces}
    found: list[Comparison] = []
    for trace in traces:
        if trace.arm != arms.strategy.name:
            continue
        twin = by_place[(arms.twin.name, trace.repeat, trace.block)]
        found += equivalence.compare_block(
            trace,
            point.blocks[trace.block],
            _answers(trace),
            _answers(twin),
            lambda: build_parts(arms.twin, point.pool, _settings(point)),
        )
    return found


def _answers(trace: Trace) -> dict[int, tuple[int, ...]]:
    return {timeline.request_id: timeline.token_ids for timeline in timelines(trace)}


def _runners(decoder: Decoder) -> list[Any]:
    """The target's runner, and the draft model's where there is one; of a decoder whose parts are not wrapped yet."""
    draft_runner = getattr(getattr(decoder, "drafter", None), "runner", None)
    return [runner for runner in (decoder.runner, draft_runner) if runner is not None]


def _footprint(target: Any, *drafts: Any) -> Footprint:
    """Of an arm's runners."""
    runners = (target, *drafts)
    return Footprint(
        weights_bytes=sum(stored_bytes(model) for model in {id(r.model): r.model for r in runners}.values()),
        weights_read_bytes=read_bytes_per_pass(target.model),
        kv_allocated_bytes=sum(runner.cache.store.allocated_bytes() for runner in runners),
        kv_bytes_per_token=target.cache.store.live_bytes([1]),
        draft_kv_bytes_per_token=sum(draft.cache.store.live_bytes([1]) for draft in drafts),
        quantized_share=quantized_share(target.model),
    )


def _memory(footprint: Footprint, traces: Sequence[Trace]) -> dict[str, float]:
    events = [event for trace in traces for event in trace.passes]
    target_tokens = max((e.kv_tokens for e in events if e.phase in TARGET_PHASES), default=0)
    draft_tokens = max((e.kv_tokens for e in events if e.phase not in TARGET_PHASES), default=0)
    kv_bytes = (
        target_tokens * footprint.kv_bytes_per_token + draft_tokens * footprint.draft_kv_bytes_per_token
    )
    return {
        "memory/weights_mib": footprint.weights_bytes / MIB,
        "memory/weights_read_mib": footprint.weights_read_bytes / MIB,
        "memory/kv_mib": kv_bytes / MIB,
        "memory/kv_allocated_mib": footprint.kv_allocated_bytes / MIB,
        "memory/kv_bytes_per_token": footprint.kv_bytes_per_token,
        "memory/quantized_share": footprint.quantized_share,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
