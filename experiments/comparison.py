"""Arms side by side on the same prompts: a baseline, candidates, and the baseline again to see the noise."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property

from experiments import equivalence, statistics
from experiments.arm_fidelity import ArmFidelity, measure_fidelity
from experiments.bench import NOBODY, Measured, Watcher, measure_bench
from experiments.config import compose_run
from experiments.equivalence import Comparison
from experiments.hardware import Remember, measure_anew
from experiments.measured_point import timed
from experiments.memory import MemoryProbeError, ProcessMemory, measure_memory
from experiments.models import LoadedModels
from experiments.plugins import WORD
from experiments.point import PreparedPoint, prepare
from experiments.statistics import Ratio, Speedups
from experiments.strategy import Arm, again_of, build_parts
from experiments.trace import answers_of

# What makes texts or times of two arms comparable.
SHARED_SETTINGS = (
    "workload",
    "batch_size",
    "device",
    "threads",
    "seed",
    "sampling",
    "measure",
    "fidelity",
    "study",
)


class ArmError(ValueError):
    """An arm does not check out; `__cause__` says why."""

    def __init__(self, label: str, error: Exception) -> None:
        super().__init__(f"arm '{label}': {error}")
        self.label = label


@dataclass(frozen=True)
class ArmSpec:
    """A strategy preset and overrides, as one writes them: `prompt_lookup draft_length.max=6`."""

    preset: str
    overrides: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> ArmSpec:
        """Raises ValueError for a text that does not begin with a preset's name, or a quote that is not closed."""
        words = re.findall(WORD, text)
        if not words or "=" in words[0] or re.sub(WORD, "", text).strip():
            raise ValueError(
                f"arm {text!r}: expected a strategy preset, then overrides, "
                "as in 'prompt_lookup draft_length.max=6'"
            )
        return ArmSpec(words[0], tuple(words[1:]))

    @property
    def label(self) -> str:
        return " ".join((self.preset, *self.overrides))

    def check_settings(self) -> None:
        """Raises ValueError for a setting that is not this arm's own."""
        for override in self.overrides:
            name = re.split(r"[.@=]", override.lstrip("+~"))[0]
            if name == "strategy":
                raise ValueError(f"arm '{self.label}' sets strategy: its first word is the strategy")
            if name in SHARED_SETTINGS:
                raise ValueError(_shared_line(self.label, name))


@dataclass(frozen=True)
class PreparedComparison:
    """Points by label, all of the same workload; the first is the baseline. Nothing heavy is loaded yet."""

    points: Mapping[str, PreparedPoint]

    @property
    def baseline(self) -> str:
        return next(iter(self.points))

    @property
    def candidates(self) -> list[str]:
        return list(self.points)[1:]

    @property
    def shared(self) -> PreparedPoint:
        """Any point, for what all have in common."""
        return self.points[self.baseline]

    def with_kernels(self) -> PreparedComparison:
        """The same comparison with what was left to the arms' weight formats chosen and named.

        An arm whose weights don't fit is left as it is: it will fail, and the others go on. The threads should be set.
        """
        points = dict(self.points)
        for label, point in self.points.items():
            with suppress(ValueError):
                points[label] = point.with_kernels()
        return PreparedComparison(points)

    def arm(self, label: str) -> Arm:
        return dataclasses.replace(self.points[label].arms.strategy, name=label)

    @property
    def again(self) -> Arm | None:
        return again_of(self.arm(self.baseline)) if self.shared.config.measure.aa else None

    @property
    def num_block_runs(self) -> int:
        """How many times a block is decoded by an arm."""
        num_arms = len(self.points) + (self.again is not None)
        return num_arms * len(self.shared.blocks) * self.shared.config.measure.repeats

    @property
    def has_one_dtype(self) -> bool:
        """Ceilings are those of one dtype: with several they are left out."""
        return len({point.config.dtype for point in self.points.values()}) == 1

    def reference_of(self, label: str, role: str) -> str | None:
        """The arm that is this one's `plain` or `twin`; None where none is, or it is that itself."""
        point = self.points[label]
        reference: Arm = getattr(point.arms, role)
        if _is_own(point, role):
            return None
        for other, candidate in self.points.items():
            if _same_engine(point, candidate) and _same_parts(reference, candidate.arms.strategy):
                return other
        return None


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison showed, by label. `memory_errors` say why a memory that was asked for is missing.

    `trouble` kept outputs or laws from being compared: whoever reports the result raises it then. `fidelities` are
    those of arms with a quantized part or a draft model.
    """

    comparison: PreparedComparison
    measured: Measured
    grades: Mapping[str, Sequence[Comparison]]
    memories: Mapping[str, ProcessMemory]
    seconds: Mapping[str, float]
    memory_errors: Mapping[str, str] = field(default_factory=dict)
    trouble: Exception | None = None
    fidelities: Mapping[str, ArmFidelity] = field(default_factory=dict)

    @cached_property
    def speedups(self) -> dict[str, Speedups]:
        """Of each candidate that ran, against the baseline."""
        reference = self.measured.timelines_of(self.comparison.baseline)
        return {
            label: statistics.speedups(self.measured.timelines_of(label), reference)
            for label in self.comparison.candidates
            if label not in self.measured.failures
        }

    @cached_property
    def by_category(self) -> dict[str, dict[str, Ratio | None]]:
        """Decode speed-ups by category of the prompts, then by candidate; empty for one category, or no candidate."""
        categories: dict[str, set[int]] = {}
        for number, prompt in enumerate(self.comparison.shared.prompts):
            categories.setdefault(prompt.category, set()).add(number)
        arms = {
            label: self.measured.timelines_of(label) for label in (self.comparison.baseline, *self.speedups)
        }

        def speedup(label: str, numbers: set[int]) -> Ratio | None:
            arm, reference = (
                {unit: timeline for unit, timeline in arms[name].items() if unit[0] in numbers}
                for name in (label, self.comparison.baseline)
            )
            return statistics.decode_speedup(arm, reference)

        if len(categories) < 2 or not self.speedups:
            return {}
        return {
            category: {label: speedup(label, numbers) for label in self.speedups}
            for category, numbers in categories.items()
        }

    def verdict(self, label: str) -> str:
        """On a candidate's decode speed-up."""
        return self.measured.verdict(self.speedups[label].decode)

    def same_texts(self, label: str) -> tuple[int, int]:
        """How many of a candidate's texts are the baseline's, token for token, and of how many."""
        ours = self.measured.timelines_of(label)
        theirs = self.measured.timelines_of(self.comparison.baseline)
        return sum(ours[unit].token_ids == theirs[unit].token_ids for unit in ours), len(ours)

    def equivalence(self, label: str) -> str:
        """Against the arm's twin, where that is among the arms and ran."""
        return equivalence.overall(self.grades.get(label, ()))

    def quality(self, label: str) -> dict[str, float]:
        """`quality/...` of the same."""
        return equivalence.quality(self.grades.get(label, ()))

    def lossless(self, label: str) -> bool:
        """Declared, and not contradicted by a comparison with the twin."""
        return (
            self.comparison.arm(label).declares_lossless and self.equivalence(label) != equivalence.DIVERGED
        )

    def references(self, label: str) -> dict[str, Speedups]:
        """Speed-ups against the baseline, and under `plain` and `twin` where those references are among the arms."""
        found = {"baseline": self.speedups[label]} if label in self.speedups else {}
        ours = self.measured.timelines_of(label)
        for role in ("plain", "twin"):
            other = self.reference(label, role)
            if other is not None:
                found[role] = statistics.speedups(ours, self.measured.timelines_of(other))
        return found

    def reference(self, label: str, role: str) -> str | None:
        """The arm that is this one's `plain` or `twin`, where both ran."""
        other = self.comparison.reference_of(label, role)
        return None if {label, other} & {None, *self.measured.failures} else other


def prepare_comparison(
    baseline: str, candidates: Sequence[str], shared_overrides: Sequence[str]
) -> PreparedComparison:
    """Compose and check all arms.

    Raises ValueError, an OmegaConf or a Hydra error for whatever can be known to be wrong before weights are loaded,
    an ArmError where it is one arm's; also for an arm that changes a setting which all arms share.
    """
    loaded = LoadedModels()
    points: dict[str, PreparedPoint] = {}
    if any(override.startswith("strategy=") for override in shared_overrides):
        raise ValueError("strategy=... is what arms differ in: say it in baseline=... and candidates=...")
    specs = [ArmSpec.parse(text) for text in (baseline, *candidates)]
    for spec in specs:
        spec.check_settings()
    for spec in specs:
        overrides = [*shared_overrides, f"strategy={spec.preset}", *spec.overrides]
        try:
            point = prepare(compose_run(overrides), loaded)
        except Exception as error:
            # Without overrides the baseline is what all arms share.
            if not points and not spec.overrides:
                raise
            raise ArmError(spec.label, error) from error
        if points:
            _check_comparable(spec.label, point, next(iter(points.values())))
        points[_unused(spec.label, points)] = point
    return PreparedComparison(_cut_alike(points))


def measure_comparison(
    comparison: PreparedComparison, watcher: Watcher = NOBODY, remember: Remember = measure_anew
) -> ComparisonResult:
    """Measure all arms interleaved.

    A candidate that fails is left without figures; whatever the baseline raises is raised.
    """
    shared, points = comparison.shared, comparison.points
    entries = [
        dataclasses.replace(point.entry(point.arms.strategy), arm=comparison.arm(label))
        for label, point in points.items()
    ]
    essential, again = [comparison.baseline], comparison.again
    if again is not None:
        entries.append(dataclasses.replace(entries[0], arm=again))
        essential.append(again.name)
    measured = measure_bench(
        entries,
        shared.blocks,
        shared.config.measure,
        threads=shared.config.threads or 1,
        seed=shared.config.seed,
        again=(again.name, comparison.baseline) if again else None,
        essential=essential,
        hardware=shared.hardware(remember) if comparison.has_one_dtype else None,
        watcher=watcher,
    )
    seconds = dict(measured.seconds)
    grades: dict[str, list[Comparison]] = {}
    replays: dict[str | None, equivalence.Memory] = {}  # by twin
    fidelities: dict[str, ArmFidelity] = {}
    memories: dict[str, ProcessMemory] = {}
    errors: dict[str, str] = {}
    trouble: Exception | None = None
    with timed(seconds, "compare outputs"):
        for label in points:
            try:
                twin = comparison.reference_of(label, "twin")
                memory = replays.setdefault(twin, {})
                grades[label] = _grades(comparison, measured, label, twin, memory)
            except Exception as error:  # what was measured is reported all the same
                trouble = error
    with timed(seconds, "measure fidelity"):
        for group in _engines(comparison, measured):
            try:
                answers = _reference_answers(comparison, measured, group)
                drafting = [label for label in group if measured.has_draft_model(label)]
                fidelities.update(measure_fidelity(group, answers, drafting))
            except Exception as error:
                trouble = error
    if shared.config.measure.memory:
        with timed(seconds, "measure memory"):
            memories, errors = _memories(comparison, measured)
    return ComparisonResult(comparison, measured, grades, memories, seconds, errors, trouble, fidelities)


def _engines(comparison: PreparedComparison, measured: Measured) -> list[dict[str, PreparedPoint]]:
    """The arms that ran, those of one engine together: they have one reference."""
    groups: list[dict[str, PreparedPoint]] = []
    for label, point in comparison.points.items():
        if label in measured.failures:
            continue
        for group in groups:
            if _same_engine(point, next(iter(group.values()))):
                group[label] = point
                break
        else:
            groups.append({label: point})
    return groups


def _reference_answers(
    comparison: PreparedComparison, measured: Measured, group: Mapping[str, PreparedPoint]
) -> dict[int, tuple[int, ...]]:
    """What the plain arm of an engine wrote, or else an arm that is lossless; none where no arm is."""
    plain = [label for label, point in group.items() if _is_own(point, "plain")]
    lossless = [label for label in group if comparison.arm(label).declares_lossless]
    found = [*plain, *lossless]
    return answers_of(measured.traces_of(found[0])) if found else {}


def _is_own(point: PreparedPoint, role: str) -> bool:
    """Is the strategy that reference itself?"""
    reference: Arm = getattr(point.arms, role)
    return reference.name == point.arms.strategy.name


def _grades(
    comparison: PreparedComparison,
    measured: Measured,
    label: str,
    twin: str | None,
    memory: equivalence.Memory,
) -> list[Comparison]:
    point = comparison.points[label]
    if twin is None or point.config.sampling.temperature > 0 or {label, twin} & set(measured.failures):
        return []
    return equivalence.compare_traces(
        measured.traces_of(label),
        measured.traces_of(twin),
        point.blocks,
        lambda: build_parts(point.arms.twin, point.pool, point.settings),
        memory,
    )


def _memories(
    comparison: PreparedComparison, measured: Measured
) -> tuple[dict[str, ProcessMemory], dict[str, str]]:
    """Of each arm that ran, alone in a process of its own; and why not, where that failed."""
    found: dict[str, ProcessMemory] = {}
    errors: dict[str, str] = {}
    known: dict[str, ProcessMemory] = {}
    for label, point in comparison.points.items():
        if label in measured.failures:
            continue
        try:
            if point.config_hash not in known:
                known[point.config_hash] = measure_memory(point.config)
            found[label] = known[point.config_hash]
        except MemoryProbeError as error:  # nothing measured is lost by it
            errors[label] = str(error)
    return found, errors


def _shared_line(label: str, name: str) -> str:
    return f"arm '{label}' sets {name}, which all arms share: give it beside the arms, not within one"


def _check_comparable(label: str, point: PreparedPoint, baseline: PreparedPoint) -> None:
    """What a preset sets by itself, and what only the prompts tell."""
    ours, theirs = asdict(point.config), asdict(baseline.config)  # by value: a plug-in may be loaded twice
    for name in SHARED_SETTINGS:
        if ours[name] != theirs[name]:
            raise ValueError(_shared_line(label, name))
    if point.workload_hash != baseline.workload_hash:
        raise ValueError(
            f"arm '{label}' reads other tokens than the baseline: compare arms of one vocabulary"
        )


def _cut_alike(points: Mapping[str, PreparedPoint]) -> dict[str, PreparedPoint]:
    """Arms of one target have laws over the same tokens, also where only one of them has a draft model to mind."""
    widths: dict[tuple[str, str | None], int] = {}
    for point in points.values():
        target = (point.config.model.target, point.config.model.revision)
        widths[target] = min(point.vocab_size, widths.get(target, point.vocab_size))
    return {
        label: dataclasses.replace(
            point, vocab_size=widths[point.config.model.target, point.config.model.revision]
        )
        for label, point in points.items()
    }


def _same_engine(point: PreparedPoint, other: PreparedPoint) -> bool:
    """All but the strategy's parts and its draft model."""
    ours, theirs = point.config, other.config
    same_target = (ours.model.target, ours.model.revision) == (theirs.model.target, theirs.model.revision)
    return same_target and (ours.dtype, ours.prefill_chunk) == (theirs.dtype, theirs.prefill_chunk)


def _same_parts(arm: Arm, other: Arm) -> bool:
    """By value: a plug-in from outside is loaded, and so defined, once per arm."""
    return {**asdict(arm), "name": ""} == {**asdict(other), "name": ""}


def _unused(label: str, taken: Mapping[str, PreparedPoint]) -> str:
    """The label, numbered where an arm is given more than once."""
    number, name = 1, label
    while name in taken:
        number += 1
        name = f"{label} ({number})"
    return name
