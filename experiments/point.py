"""One point of an experiment, prepared: everything resolved and checked that needs no weights."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments import plugins
from experiments.bench import Entry
from experiments.config import RunConfig
from experiments.corpora import check_corpus, corpus_texts
from experiments.environment import default_threads, quota_cores
from experiments.hardware import Hardware, Remember, measure_anew
from experiments.models import LoadedModels, ModelPool, resolve_device, resolve_dtype, torch_dtype
from experiments.sampling import check_token_ids, sampling_params, stop_ids, stop_rule
from experiments.strategy import Arm, Arms, EngineSettings, arms_of, build_decoder
from experiments.teacher_forcing import ForcedText
from experiments.workloads.base import Prompt, WorkloadContext, encode
from quant.plan import WeightsPlan
from specdec.generation import end_of_text_ids
from specdec.hf_adapter import cache_shape, check_supported
from specdec.types import Request


@dataclass(frozen=True)
class PreparedPoint:
    """A point that is ready to be measured; nothing heavy is loaded yet.

    `config` has every `auto` resolved, but for those of weight formats, which `with_kernels` leaves none of. `requests`
    are in the order of `prompts`, their ids are indices. All laws are over the first `vocab_size` tokens. `corpus` is
    for a strategy that doesn't keep the reference's laws; empty for others.
    """

    config: RunConfig
    arms: Arms
    pool: ModelPool
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    tokenize_ms: float
    vocab_size: int
    corpus: Sequence[ForcedText] = ()

    @property
    def blocks(self) -> list[Sequence[Request]]:
        """The requests in groups that are decoded together."""
        size = self.config.batch_size
        return [self.requests[start : start + size] for start in range(0, len(self.requests), size)]

    @property
    def num_slots(self) -> int:
        """Rows that are decoded together at most."""
        return min(self.config.batch_size, len(self.requests))

    @property
    def capacity(self) -> int:
        return max(request.max_length for request in self.requests)

    @property
    def num_block_runs(self) -> int:
        """How many times a block is decoded by an arm."""
        return len(self.arms.measured) * len(self.blocks) * self.config.measure.repeats

    @property
    def settings(self) -> EngineSettings:
        """What all arms share. Loads the target."""
        config, tokenizer = self.config, self.pool.tokenizer
        end_of_text = end_of_text_ids(self.pool.target(self.arms.strategy.weights))
        return EngineSettings(
            num_slots=self.num_slots,
            capacity=self.capacity,
            sampling=sampling_params(config.sampling, tokenizer),
            stop_ids=stop_ids(config.sampling, end_of_text),
            seed=config.seed,
            stop_rule=stop_rule(config.sampling, end_of_text, tokenizer),
            prefill_chunk=config.prefill_chunk,
            vocab_size=self.vocab_size,
        )

    def weight_plans(self, arm: Arm) -> dict[str, WeightsPlan | None]:
        """How an arm's weights will be stored and multiplied: `target`, and `draft` where a model drafts.

        None for a format that has nothing to tell. Kernels are chosen by timing them, once per process, so the threads
        should be set. Raises ValueError, in one line, where a format can't hold its model.
        """
        plans = {"target": self.pool.target_plan(arm.weights)}
        if hasattr(arm.drafter, "weights"):
            plans["draft"] = self.pool.draft_plan(arm.drafter.weights)
        return plans

    def kernels(self, arm: Arm) -> list[str]:
        """What will multiply by an arm's weights, the target's first. Raises what `weight_plans` does."""
        names = [
            [weights.kernels] if plan is None else plan.kernels
            for weights, plan in zip(arm.all_weights, self.weight_plans(arm).values(), strict=True)
        ]
        return list(dict.fromkeys(name for found in names for name in found))

    def with_kernels(self) -> PreparedPoint:
        """The same point with what was left to its weight formats chosen and named, so that its hash says what runs.

        The threads should be set, see `weight_plans`, which raises the same.
        """
        config, pool = self.config, self.pool
        config = replace(config, weights=pool.resolved_target(config.weights))
        if hasattr(config.drafter, "weights"):
            weights = pool.resolved_draft(config.drafter.weights)
            config = replace(config, drafter=replace(config.drafter, weights=weights))
        return replace(self, config=config, arms=arms_of(config))

    def entry(self, arm: Arm) -> Entry:
        """An arm of this point, ready for the bench."""
        return Entry(arm, lambda: build_decoder(arm, self.pool, self.settings))

    def hardware(self, remember: Remember = measure_anew) -> Hardware | None:
        """What measures the ceilings for this point's setting; None where they are to be left out."""
        if self.config.measure.ceilings == "skip":
            return None
        return Hardware(self.pool.device, self.pool.dtype, self.config.threads or 1, remember)

    @property
    def config_hash(self) -> str:
        return _hash(asdict(self.config))

    @property
    def workload_hash(self) -> str:
        return _hash([[request.prompt_ids, request.max_new_tokens] for request in self.requests])


def prepare(config: RunConfig, loaded: LoadedModels | None = None) -> PreparedPoint:
    """Resolve and check a configuration. Points that are given the same `loaded` share the models they have in common.

    Raises ValueError or BundledModelError, in one line, for whatever can be known to be wrong before weights
    are loaded: names, files, vocabularies, model families, texts beyond the context, KV stores of another shape.
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
    pool = ModelPool(config.model, torch_dtype(config.dtype), device, loaded)
    if hasattr(config.drafter, "weights") and not config.drafter.weights:
        config = replace(config, drafter=replace(config.drafter, weights=pool.default_draft_weights))
    if pool.revision:  # a branch moves; the commit that was loaded does not
        config = replace(config, model=replace(config.model, revision=pool.revision))
    if pool.draft_revision:
        config = replace(config, model=replace(config.model, draft_revision=pool.draft_revision))
    sampling_params(config.sampling, pool.tokenizer)  # refuses what is out of range
    check_token_ids(config.sampling, pool.vocab_size)
    prompts = config.workload.load(WorkloadContext(pool.vocab_size, config.seed))
    start_s = time.perf_counter()
    encoded = [encode(prompt, pool.tokenizer) for prompt in prompts]
    tokenize_ms = 1e3 * (time.perf_counter() - start_s) / len(prompts)
    requests = [
        Request(index, tuple(token_ids), config.workload.max_new_tokens)
        for index, token_ids in enumerate(encoded)
    ]
    _check_fits(pool, prompts, requests)
    point = PreparedPoint(config, arms_of(config), pool, prompts, requests, tokenize_ms, pool.vocab_size)
    _check_stores(point)
    check_corpus(config.fidelity)
    if point.arms.strategy.keeps_laws:
        return point
    return replace(point, corpus=corpus_texts(config.fidelity, pool.tokenizer, _context(pool)))


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


def _check_stores(point: PreparedPoint) -> None:
    """Can the arms' KV stores hold the target's heads and the arms' passes? A store without `check` holds any."""
    pool = point.pool
    for arm in point.arms.distinct:
        if hasattr(arm.kv, "check"):
            arm.kv.check(
                cache_shape(
                    pool.target_config,
                    point.num_slots,
                    point.capacity,
                    pool.dtype,
                    pool.device,
                    arm.longest_pass,
                )
            )


def _context(pool: ModelPool) -> int:
    """Tokens that every model of the run can hold."""
    return min(model_config.max_position_embeddings for model_config in pool.configs.values())


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
