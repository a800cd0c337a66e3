"""Strategy = weights x kv x decoding: the arms of a run, and the decoder each is built into."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments import plugins
from experiments.bit_probe import check_bits
from experiments.config import RunConfig
from experiments.models import ModelPool
from experiments.pass_costs import measure_costs
from specdec.decoding.base import Decoder, DecodingParts
from specdec.drafters.base import Drafter, DrafterContext
from specdec.draws import KeyedDraws
from specdec.kv_cache import KVCache
from specdec.progress import StopRule
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import SamplingParams


@dataclass(frozen=True)
class Arm:
    """One way to decode: the options of its parts. `name` labels it within a run.

    `pass_tokens`: every pass has so many tokens per row, for bitwise exactness; None: as many as needed.
    """

    name: str
    weights: Any
    kv: Any
    decoding: Any
    drafter: Any = None
    verifier: Any = None
    draft_length: Any = None
    pass_tokens: int | None = None

    @property
    def declares_lossless(self) -> bool:
        """Declared, not checked: the output law is that of plain weights, plain cache, one token per pass."""
        verifies_exactly = self.verifier is None or self.verifier.lossless
        return self.keeps_laws and verifies_exactly

    @property
    def keeps_laws(self) -> bool:
        """Declared: the target's laws are those of plain weights and plain cache, whatever the decoding adds."""
        return self.weights.lossless and self.kv.lossless

    @property
    def all_weights(self) -> list[Any]:
        """Formats of the weights, as options: the target's, then a draft model's where there is one."""
        draft = getattr(self.drafter, "weights", "")
        return [self.weights, *([plugins.written_options("weights", draft)] if draft else [])]

    @property
    def longest_pass(self) -> int:
        """Tokens per row of its widest pass that is not over a prompt: the newest token and the drafts behind it.

        All passes are as wide where they are of one shape.
        """
        if self.pass_tokens is not None:
            return self.pass_tokens
        return 1 if self.draft_length is None else self.draft_length.max + 1

    def same_parts(self, other: Arm) -> bool:
        return dataclasses.replace(self, name="") == dataclasses.replace(other, name="")


@dataclass(frozen=True)
class Arms:
    """A strategy and its references, which may be the same arm, or the strategy itself.

    `twin`: one token per pass, same weights and cache: speculation must equal it.
    `plain`: unquantized weights and dense cache as well: speed-up and fidelity are measured against it.
    `again`: `plain` a second time, the A/A arm, whose difference from the first is noise.
    """

    strategy: Arm
    twin: Arm
    plain: Arm
    again: Arm | None = None

    @property
    def distinct(self) -> list[Arm]:
        """Without the A/A arm."""
        return list({arm.name: arm for arm in (self.strategy, self.twin, self.plain)}.values())

    @property
    def measured(self) -> list[Arm]:
        return [*self.distinct, *([] if self.again is None else [self.again])]


def arms_of(config: RunConfig) -> Arms:
    """The strategy that a configuration names, with its references."""
    strategy = Arm(
        config.strategy,
        config.weights,
        config.kv,
        config.decoding,
        config.drafter,
        config.verifier,
        config.draft_length,
        _pass_tokens(config),
    )
    autoregressive = plugins.default_options("decoding", "autoregressive")
    twin = Arm("twin", config.weights, config.kv, autoregressive, pass_tokens=strategy.pass_tokens)
    plain = Arm(
        "plain",
        plugins.default_options("weights", "plain"),
        plugins.default_options("kv", "dense"),
        autoregressive,
    )
    if twin.same_parts(plain):
        twin = plain = dataclasses.replace(plain, name="reference")
    if strategy.same_parts(twin):
        twin = strategy
    if strategy.same_parts(plain):
        plain = strategy
    return Arms(strategy, twin, plain, again_of(plain) if config.measure.aa else None)


def _pass_tokens(config: RunConfig) -> int | None:
    if config.exactness.mode != "bitwise":
        return None
    drafted = 0 if config.draft_length is None else config.draft_length.max
    # A multiple of 4: some kernels round the rows beyond one otherwise.
    return config.exactness.pass_tokens or -(-(drafted + 1) // 4) * 4


def again_of(arm: Arm) -> Arm:
    """The same arm under another name."""
    return dataclasses.replace(arm, name=f"{arm.name} again")


@dataclass(frozen=True)
class EngineSettings:
    """What all arms of a run share. `vocab_size`: laws are over so many tokens; None: the target's own width."""

    num_slots: int
    capacity: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    stop_rule: StopRule
    prefill_chunk: int | None
    vocab_size: int | None = None


def build_decoder(arm: Arm, pool: ModelPool, settings: EngineSettings) -> Decoder:
    """The decoder of an arm, with caches of its own. Raises what `build_parts` does."""
    return arm.decoding.build(build_parts(arm, pool, settings))


def build_parts(arm: Arm, pool: ModelPool, settings: EngineSettings) -> DecodingParts:
    """Runner, drafter and the rest of an arm, with caches of their own.

    Raises ValueError, in one line, where the parts don't fit together.
    """
    runner = build_runner(arm, pool, settings)
    if arm.pass_tokens is not None:
        check_bits(runner, arm.pass_tokens, settings.num_slots, settings.capacity)
    parts = DecodingParts(
        runner,
        Sampler(settings.sampling, settings.stop_ids),
        KeyedDraws(settings.seed),
        settings.stop_rule,
        settings.num_slots,
        verifier=None if arm.verifier is None else arm.verifier.build(),
    )
    if arm.drafter is None:
        return parts
    costs = None
    if arm.draft_length.needs_costs:
        # With a drafter of its own: one that remembers texts must not know the one that this is measured with.
        throwaway = dataclasses.replace(parts, drafter=build_drafter(arm, pool, settings, runner.cache))
        costs = measure_costs(throwaway, arm.draft_length.max, settings.capacity)
        del throwaway  # and its cache, before there is another
    return dataclasses.replace(
        parts,
        drafter=build_drafter(arm, pool, settings, runner.cache),
        draft_length=arm.draft_length.build(costs),
    )


def build_runner(arm: Arm, pool: ModelPool, settings: EngineSettings) -> ModelRunner:
    """The target of an arm, with a cache of its own."""
    return ModelRunner(
        pool.target(arm.weights),
        settings.num_slots,
        settings.capacity,
        prefill_chunk=settings.prefill_chunk,
        pass_tokens=arm.pass_tokens,
        vocab_size=settings.vocab_size,
        longest_pass=arm.longest_pass,
        make_store=arm.kv.build,
    )


def build_drafter(
    arm: Arm, pool: ModelPool, settings: EngineSettings, target_cache: KVCache
) -> Drafter | None:
    """The drafter of an arm, with a cache of its own or on the target's; None for an arm without."""
    if arm.drafter is None:
        return None
    target = pool.target(arm.weights)
    context = DrafterContext(
        settings.num_slots,
        settings.capacity,
        target.config.vocab_size if settings.vocab_size is None else settings.vocab_size,
        target.device,
        Sampler(settings.sampling, settings.stop_ids),
        target,
        pool.draft,
        target_cache,
        pool.draft_is_target,
        settings.prefill_chunk,
        pool.target_copy,
    )
    return arm.drafter.build(context)
