"""Arms on the bench: built beside each other, measured in turn, weighed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from experiments import statistics
from experiments.config import MeasureConfig
from experiments.hardware import Hardware
from experiments.load import ForeignLoad, LoadMeter
from experiments.measure import measure
from experiments.metrics import TARGET_PHASES, arm_metrics, prompt_reads
from experiments.model_cost import model_cost
from experiments.roofline import Ceilings, ModelCost, PassParts, floor_ms, mbu_frac, mfu_frac, pass_parts
from experiments.statistics import NO_DIFFERENCE, TOO_FEW, Ratio, Unit
from experiments.strategy import Arm
from experiments.trace import PassEvent, RequestTimeline, Trace, timelines
from quant.footprint import bits_per_weight, quantized_share, stored_bytes
from specdec.decoding.base import Decoder
from specdec.types import Request

MIB = 2**20
# One A/A arm in a hundred says noisy although nothing is: enough to catch a machine whose speed drifts.
AA_CONFIDENCE = 0.99
OK, NOISY = "ok", "noisy"


class UnfitPartsError(ValueError):
    """Parts don't fit together, as only loading them could tell; the message is the one line for the user."""


@dataclass(frozen=True)
class Entry:
    """One arm and what builds its decoder, weights included. Names are unique on a bench."""

    arm: Arm
    make: Callable[[], Decoder]

    @property
    def name(self) -> str:
        return self.arm.name

    def build(self) -> Decoder:
        try:
            return self.make()
        except ValueError as error:
            raise UnfitPartsError(str(error)) from error


@dataclass(frozen=True)
class Footprint:
    """Bytes of one arm, and what its passes move and compute.

    `weights_bytes` and `kv_allocated_bytes` include a draft model's, which may have a cache of its own or go on from
    the target's; `quantized_share` and `bits_per_weight` (scales included) are the target's; `overhead_ms` are those of
    a target and of a draft pass, None where they weren't measured.
    """

    weights_bytes: int
    kv_allocated_bytes: int
    quantized_share: float
    bits_per_weight: float
    target: ModelCost
    draft: ModelCost | None = None
    draft_has_own_cache: bool = True
    target_overhead_ms: float | None = None
    draft_overhead_ms: float | None = None


@dataclass(frozen=True)
class Measured:
    """Arms that were measured in turn. `failures` are the arms that raised, which have no figures.

    `again` names the A/A arm and the arm that it repeats. `unsettled` are arms whose warm-up did not end in
    stable step times. Without `ceilings` there are no shares of them.
    """

    traces: Sequence[Trace]
    footprints: Mapping[str, Footprint]
    load: ForeignLoad
    ceilings: Ceilings | None = None
    again: tuple[str, str] | None = None
    unsettled: Sequence[str] = ()
    failures: Mapping[str, Exception] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def traces_of(self, name: str) -> list[Trace]:
        return [trace for trace in self.traces if trace.arm == name]

    def timelines_of(self, name: str) -> dict[Unit, RequestTimeline]:
        return statistics.by_unit([t for trace in self.traces_of(name) for t in timelines(trace)])

    def has_draft_model(self, name: str) -> bool:
        """Of an arm that could be built: does its drafter have a model?"""
        return self.footprints[name].draft is not None

    @cached_property
    def noise_floor(self) -> Ratio | None:
        """An arm against itself, in decode speed; None without an A/A arm, or without a usable pair."""
        if self.again is None or any(name in self.failures for name in self.again):
            return None
        arm, reference = (self.timelines_of(name) for name in self.again)
        return statistics.decode_speedup(arm, reference)

    @cached_property
    def validity(self) -> str:
        """`noisy` where other processes took processor time, or an arm differed from itself; else `ok`."""
        return NOISY if self.load.is_noisy or self._differs_from_itself else OK

    def verdict(self, ratio: Ratio | None) -> str:
        """Faster, slower, or no difference shown; none from a noisy run."""
        if ratio is None:
            return TOO_FEW
        return ratio.verdict if self.validity == OK or ratio.verdict == TOO_FEW else NOISY

    def metrics_of(self, name: str) -> dict[str, float]:
        """One arm's metrics by contract name, memory and shares of the ceilings included."""
        traces, footprint = self.traces_of(name), self.footprints[name]
        return {**arm_metrics(traces), **_memory(footprint, traces), **self._roofline(name)}

    def parts_of(self, name: str) -> dict[str, PassParts]:
        """Where a mean target pass (after prefill) and a mean draft pass went; empty without ceilings."""
        footprint, found = self.footprints[name], {}
        for label, phases, cost, overhead_ms in (
            ("target", ("decode", "verify"), footprint.target, footprint.target_overhead_ms),
            ("draft", ("draft",), footprint.draft, footprint.draft_overhead_ms),
        ):
            if self.ceilings is not None and cost is not None and overhead_ms is not None:
                parts = pass_parts(self.passes_of(name, *phases), cost, self.ceilings, overhead_ms)
                if parts is not None:
                    found[label] = parts
        return found

    def passes_of(self, name: str, *phases: str) -> list[PassEvent]:
        return [event for trace in self.traces_of(name) for event in trace.passes if event.phase in phases]

    def _prompt_reads(self, name: str) -> list[PassEvent]:
        return [event for trace in self.traces_of(name) for event in prompt_reads(trace)]

    @property
    def _differs_from_itself(self) -> bool:
        if self.again is None or self.noise_floor is None:
            return False
        arm, reference = (self.timelines_of(name) for name in self.again)
        ratio = statistics.decode_speedup(arm, reference, AA_CONFIDENCE)
        return ratio is not None and ratio.verdict not in (NO_DIFFERENCE, TOO_FEW)

    def _roofline(self, name: str) -> dict[str, float]:
        if self.ceilings is None:
            return {}
        footprint, ceilings = self.footprints[name], self.ceilings
        found: dict[str, float | None] = {
            "roofline/mbu_target_pct": _percent(
                mbu_frac(self.passes_of(name, "decode", "verify"), footprint.target, ceilings)
            ),
            "roofline/mfu_prefill_pct": _percent(
                mfu_frac(self._prompt_reads(name), footprint.target, ceilings)
            ),
            "roofline/floor_ms": floor_ms(footprint.target, ceilings),
        }
        if footprint.draft is not None:
            draft = mbu_frac(self.passes_of(name, "draft"), footprint.draft, ceilings)
            found["roofline/mbu_draft_pct"] = _percent(draft)
        for label, parts in self.parts_of(name).items():
            found[f"roofline/{label}_pass_ms.mean"] = parts.pass_ms
            found[f"roofline/{label}_kv_ms"] = parts.kv_ms
            found[f"roofline/{label}_overhead_ms"] = parts.overhead_ms
            found[f"roofline/{label}_rest_ms"] = parts.rest_ms
        return {metric: value for metric, value in found.items() if value is not None}


@dataclass(frozen=True)
class Watcher:
    """Who is told what while a bench is at work; nothing is called in a timed region."""

    on_loaded: Callable[[Mapping[str, Footprint]], None] = lambda footprints: None
    on_progress: Callable[[str], None] = lambda arm: None
    on_measured: Callable[[Sequence[Trace]], None] = lambda traces: None


NOBODY = Watcher()


def measure_bench(
    entries: Sequence[Entry],
    blocks: Sequence[Sequence[Request]],
    config: MeasureConfig,
    *,
    threads: int,
    seed: int,
    again: tuple[str, str] | None = None,
    essential: Sequence[str] = (),
    hardware: Hardware | None = None,
    watcher: Watcher = NOBODY,
) -> Measured:
    """Load the models, measure the ceilings, then all arms interleaved.

    Args:
        again: names of the A/A arm and of the one it repeats; both are among the entries.
        essential: arms whose failure is raised; that of another leaves it without figures.
        hardware: what measures or remembers the ceilings; without it there are none.

    Raises UnfitPartsError where an essential arm's parts don't fit, and whatever an essential arm raises.
    """
    torch.set_num_threads(threads)
    started_s = time.perf_counter()
    failures: dict[str, Exception] = {}
    decoders = _build(entries, essential, failures)
    runners = {name: _runners(decoder) for name, decoder in decoders.items()}
    loaded_s = time.perf_counter()
    watcher.on_loaded({name: _footprint(*found) for name, found in runners.items()})
    ceilings = None if hardware is None else hardware.ceilings()
    overheads = {} if hardware is None else _overheads(entries, decoders, runners, hardware)
    ceilings_s = time.perf_counter()

    def on_failure(name: str, error: Exception) -> None:
        if name in essential:
            raise error
        failures[name] = error

    unsettled: list[str] = []
    load = LoadMeter()
    traces = measure(
        decoders,
        blocks,
        repeats=config.repeats,
        warmup=config.warmup,
        seed=seed,
        on_progress=watcher.on_progress,
        on_unsettled=unsettled.append,
        on_failure=on_failure,
    )
    foreign_load = load.read()
    watcher.on_measured(traces)
    seconds = {"load": loaded_s - started_s, "warm up and measure": time.perf_counter() - ceilings_s}
    if hardware is not None:
        seconds["measure ceilings"] = ceilings_s - loaded_s
    return Measured(
        [trace for trace in traces if trace.arm not in failures],
        # Again: some formats store their weights otherwise from the first forward on.
        {name: _footprint(*found, overheads=overheads.get(name, ())) for name, found in runners.items()},
        foreign_load,
        ceilings,
        again,
        unsettled,
        failures,
        seconds,
    )


def _build(
    entries: Sequence[Entry], essential: Sequence[str], failures: dict[str, Exception]
) -> dict[str, Decoder]:
    decoders = {}
    for entry in entries:
        try:
            decoders[entry.name] = entry.build()
        except Exception as error:
            if entry.name in essential:
                raise
            failures[entry.name] = error
    return decoders


def _runners(decoder: Decoder) -> list[Any]:
    """The target's runner, and the draft model's where there is one; of a decoder whose parts are not wrapped yet."""
    draft_runner = getattr(getattr(decoder, "drafter", None), "runner", None)
    return [runner for runner in (decoder.runner, draft_runner) if runner is not None]


def _overheads(
    entries: Sequence[Entry],
    decoders: Mapping[str, Decoder],
    runners: Mapping[str, Sequence[Any]],
    hardware: Hardware,
) -> dict[str, list[float | None]]:
    """Of each arm's target pass and, where there is one, draft pass."""
    known: dict[tuple[str, str], float | None] = {}

    def overhead_ms(runner: Any, weights: Any) -> float | None:
        key = (str(runner.model.config), str(weights))
        if key not in known:
            known[key] = hardware.overhead_ms(runner.model.config, weights)
        return known[key]

    return {
        entry.name: [
            overhead_ms(runner, weights)
            for runner, weights in zip(runners[entry.name], entry.arm.all_weights, strict=False)
        ]
        for entry in entries
        if entry.name in decoders
    }


def _footprint(*runners: Any, overheads: Sequence[float | None] = ()) -> Footprint:
    """Of an arm's runners: the target's, then a draft model's."""
    costs = [model_cost(runner) for runner in runners]
    target_ms, draft_ms, *_ = [*overheads, None, None]
    stores = {id(runner.cache.store): runner.cache.store for runner in runners}.values()
    return Footprint(
        # Together: a draft made of the target's own modules stores nothing of its own.
        weights_bytes=stored_bytes(nn.ModuleList(runner.model for runner in runners)),
        kv_allocated_bytes=sum(store.allocated_bytes() for store in stores),
        quantized_share=quantized_share(runners[0].model),
        bits_per_weight=bits_per_weight(runners[0].model),
        target=costs[0],
        draft=costs[1] if len(costs) > 1 else None,
        draft_has_own_cache=len(stores) > 1,
        target_overhead_ms=target_ms,
        draft_overhead_ms=draft_ms,
    )


def _memory(footprint: Footprint, traces: Sequence[Trace]) -> dict[str, float]:
    events = [event for trace in traces for event in trace.passes]

    def most_kv_bytes(cost: ModelCost | None, is_target: bool) -> float:
        mine = [event for event in events if (event.phase in TARGET_PHASES) == is_target]
        if cost is None or not mine:
            return 0
        return max(cost.held_kv_bytes(event.kv_lengths + event.other_kv_lengths) for event in mine)

    draft = footprint.draft if footprint.draft_has_own_cache else None
    kv_bytes = most_kv_bytes(footprint.target, True) + most_kv_bytes(draft, False)
    return {
        "memory/weights_mib": footprint.weights_bytes / MIB,
        "memory/weights_read_mib": footprint.target.weights_read_bytes / MIB,
        "memory/kv_mib": kv_bytes / MIB,
        "memory/kv_allocated_mib": footprint.kv_allocated_bytes / MIB,
        "memory/kv_bytes_per_token": footprint.target.kv_bytes_per_token,
        "memory/quantized_share": footprint.quantized_share,
        "memory/bits_per_weight": footprint.bits_per_weight,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
