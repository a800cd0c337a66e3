"""A point, measured: the strategy beside its references, its output graded against its twin's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from experiments import equivalence, metrics, statistics
from experiments.arm_fidelity import ArmFidelity, measure_fidelity
from experiments.bench import NOBODY, Footprint, Measured, Watcher, measure_bench
from experiments.equivalence import Comparison
from experiments.hardware import Remember, measure_anew
from experiments.memory import MemoryProbeError, ProcessMemory, measure_memory
from experiments.point import PreparedPoint
from experiments.statistics import Ratio, Unit
from experiments.strategy import Arm, build_parts
from experiments.trace import RequestTimeline, Trace, answers_of


@dataclass(frozen=True)
class PointResult:
    """What a measured point showed. Speed-ups are None where the strategy is its own reference.

    `memory` is that of the strategy alone in its own process; None where it wasn't measured, `memory_error` says
    why if it was tried. `trouble` kept outputs or laws from being compared: whoever reports the result raises it then.
    `fidelity` is None for a strategy that has neither a quantized part nor a draft model.
    """

    point: PreparedPoint
    measured: Measured
    comparisons: Sequence[Comparison]
    seconds: Mapping[str, float]
    memory: ProcessMemory | None = None
    memory_error: str | None = None
    trouble: Exception | None = None
    fidelity: ArmFidelity | None = None

    @property
    def traces(self) -> Sequence[Trace]:
        return self.measured.traces

    @property
    def footprints(self) -> Mapping[str, Footprint]:
        return self.measured.footprints

    def traces_of(self, arm: Arm) -> list[Trace]:
        return self.measured.traces_of(arm.name)

    def timelines_of(self, arm: Arm) -> dict[Unit, RequestTimeline]:
        return self.measured.timelines_of(arm.name)

    @cached_property
    def speedups(self) -> dict[str, Ratio | None]:
        """By metric name without the section: decode_vs_plain, decode_vs_twin, total_vs_plain, total_vs_twin."""
        arms, found = self.point.arms, {}
        for role, reference in (("plain", arms.plain), ("twin", arms.twin)):
            if reference.name != arms.strategy.name:
                ratios = statistics.speedups(self.timelines_of(arms.strategy), self.timelines_of(reference))
                found[f"decode_vs_{role}"] = ratios.decode
                found[f"total_vs_{role}"] = ratios.total
        return found

    @property
    def verdict(self) -> str | None:
        """On the decode speed-up against `plain`; None for a strategy that is its own reference."""
        if "decode_vs_plain" not in self.speedups:
            return None
        return self.measured.verdict(self.speedups["decode_vs_plain"])

    @property
    def equivalence(self) -> str:
        return equivalence.overall(self.comparisons)

    @property
    def lossless(self) -> bool:
        """Declared, and not contradicted by the comparison with the twin."""
        return self.point.arms.strategy.declares_lossless and self.equivalence != equivalence.DIVERGED

    @property
    def validity(self) -> str:
        return self.measured.validity

    @property
    def excluded(self) -> dict[Unit, str]:
        """Prompts that no speed-up is computed from, with the reason."""
        return statistics.excluded_units(*(self.timelines_of(arm) for arm in self.point.arms.distinct))

    def metrics_of(self, arm: Arm) -> dict[str, float]:
        """One arm's own metrics, memory included."""
        return self.measured.metrics_of(arm.name)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Everything that is logged for the strategy, by contract name."""
        arms = self.point.arms
        found = self.metrics_of(arms.strategy)
        found["latency/tokenize_ms.mean"] = self.point.tokenize_ms
        found.update(metrics.prediction(self.traces_of(arms.strategy), self.traces_of(arms.plain)))
        for name, ratio in self.speedups.items():
            found.update(ratio_metrics(f"speedup/{name}", ratio))
        found.update(ratio_metrics("noise/again_vs_itself", self.measured.noise_floor))
        if self.memory is not None:
            found.update(self.memory.metrics())
        if self.fidelity is not None:
            found.update(self.fidelity.metrics)
        return {**found, **equivalence.quality(self.comparisons)}


def ratio_metrics(name: str, ratio: Ratio | None) -> dict[str, float]:
    """A ratio with its interval, as far as there is one."""
    if ratio is None:
        return {}
    if ratio.ci_low is None or ratio.ci_high is None:
        return {name: ratio.value}
    return {name: ratio.value, f"{name}.ci_low": ratio.ci_low, f"{name}.ci_high": ratio.ci_high}


def measure_point(
    point: PreparedPoint, watcher: Watcher = NOBODY, remember: Remember = measure_anew
) -> PointResult:
    """Load the models, measure all arms interleaved, and grade the strategy's output against its twin's.

    `remember` says how ceilings are kept. Raises UnfitPartsError where a weight format can't hold the model, or
    parts refuse each other.
    """
    config, arms = point.config, point.arms
    names = [arm.name for arm in arms.measured]
    measured = measure_bench(
        [point.entry(arm) for arm in arms.measured],
        point.blocks,
        config.measure,
        threads=config.threads or 1,
        seed=config.seed,
        again=(arms.again.name, arms.plain.name) if arms.again else None,
        essential=names,
        hardware=point.hardware(remember),
        watcher=watcher,
    )
    seconds = dict(measured.seconds)
    comparisons: list[Comparison] = []
    fidelity: ArmFidelity | None = None
    trouble: Exception | None = None
    try:
        with timed(seconds, "compare outputs"):
            comparisons = _compare(point, measured)
        with timed(seconds, "measure fidelity"):
            fidelity = _fidelity(point, measured)
    except Exception as error:  # what was measured is reported all the same
        trouble = error
    memory, memory_error = None, None
    if config.measure.memory:
        with timed(seconds, "measure memory"):
            memory, memory_error = _memory(point)
    return PointResult(point, measured, comparisons, seconds, memory, memory_error, trouble, fidelity)


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Adds how long the block took, also where it raises."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        seconds[what] = time.perf_counter() - start_s


def _fidelity(point: PreparedPoint, measured: Measured) -> ArmFidelity | None:
    name = point.arms.strategy.name
    answers = answers_of(measured.traces_of(point.arms.plain.name))
    drafting = [name] if measured.has_draft_model(name) else []
    return measure_fidelity({name: point}, answers, drafting).get(name)


def _compare(point: PreparedPoint, measured: Measured) -> list[Comparison]:
    """Grades against the twin; none when sampling, or for a strategy that is its twin."""
    arms = point.arms
    if point.config.sampling.temperature > 0 or arms.twin.name == arms.strategy.name:
        return []
    return equivalence.compare_traces(
        measured.traces_of(arms.strategy.name),
        measured.traces_of(arms.twin.name),
        point.blocks,
        lambda: build_parts(arms.twin, point.pool, point.settings),
    )


def _memory(point: PreparedPoint) -> tuple[ProcessMemory | None, str | None]:
    try:
        return measure_memory(point.config), None
    except MemoryProbeError as error:  # nothing measured is lost by it
        return None, str(error)
