"""Every kind of pass under the machine's roof, and beside it the counter that says busy while arithmetic idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import AGREES_FRAC
from experiments.articles.kinds import (
    DECODE,
    PREFILL,
    VERIFY,
    Kind,
    MeasuredKind,
    again_and_again,
    measure_kind,
)
from experiments.articles.lab import Lab, LimitError
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.articles.utilization import Utilization, utilization
from experiments.config import check
from experiments.plots import roofline as plot
from experiments.roofline import Ceilings
from experiments.theory import ridge_flop_per_byte


@dataclass
class RooflineOptions(ArticleOptions):
    """`prompts`: tokens of each prefill. `batches`: rows of decode steps, behind `context_tokens`, and of one row
    behind each of `contexts`. `drafts` + 1 tokens are in each verify pass. `busy_s`: how long a counter is watched.
    """

    title: ClassVar[str] = "Every kind of pass under the roof of this machine"

    prompts: list[int] = field(default_factory=lambda: [16, 64, 256, 1024])
    batches: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    contexts: list[int] = field(default_factory=lambda: [2048])
    drafts: list[int] = field(default_factory=lambda: [4])
    context_tokens: int = 128
    busy_s: float = 2.5

    def __post_init__(self) -> None:
        self.check_at_least(prompts=1, batches=1, context_tokens=1)
        for name in ("contexts", "drafts"):
            steps = getattr(self, name)
            check(not steps or min(steps) >= 1, f"experiment.{name}", steps, "numbers of at least 1, or none")
        check(self.busy_s > 0, "experiment.busy_s", self.busy_s, "seconds above 0")

    @property
    def kinds(self) -> list[Kind]:
        context = self.context_tokens
        return [
            *(Kind(PREFILL, f"{tokens:,} tokens", 1, tokens, 0) for tokens in sorted(set(self.prompts))),
            *(Kind(DECODE, _rows(rows), rows, 1, context) for rows in sorted(set(self.batches))),
            *(Kind(DECODE, f"behind {length:,}", 1, 1, length) for length in sorted(set(self.contexts))),
            *(
                Kind(VERIFY, f"{drafts} drafts", 1, drafts + 1, context)
                for drafts in sorted(set(self.drafts))
            ),
        ]

    def measure(self, lab: Lab) -> Findings:
        found: list[tuple[MeasuredKind, Timing]] = []
        limits: dict[str, str] = {}
        for kind in self.kinds:
            try:
                found.append(measure_kind(lab, kind))
            except LimitError as limit:
                limits[str(kind)] = str(limit)
        if not found:
            raise LimitError("; ".join(f"{where}: {why}" for where, why in limits.items()))
        measured = [one for one, _ in found]
        watched = [self._watch(lab, one) for one in to_watch(measured)]
        title = headline(watched, measured, lab.ceilings)
        points = {
            phase: [one.point for one in measured if one.kind.phase == phase]
            for phase in (PREFILL, DECODE, VERIFY)
        }
        return Findings(
            title,
            metrics={"roofline/ridge_flop_per_byte": ridge_flop_per_byte(lab.ceilings), **_metrics(watched)},
            tables={
                "Passes, and the intensity that the articles would say": _table(found),
                "What a counter says while such passes run again and again": _counter_table(watched),
            },
            figures={"roofline.png": plot.roofline(points, lab.ceilings, title)},
            notes=_notes(measured, watched, lab.ceilings),
            limits=limits,
        )

    def _watch(self, lab: Lab, one: MeasuredKind) -> Watched:
        """Behind what was measured already, so it fits."""
        work = again_and_again(lab, one.kind)
        counter = utilization(work, lab.device, lab.hardware.threads, self.busy_s)
        return Watched(one.taking(counter.pass_ms), counter)


@dataclass(frozen=True)
class Watched:
    """Passes of one kind, again and again, as long as their mean, and what a counter read meanwhile."""

    passes: MeasuredKind
    counter: Utilization


def to_watch(measured: Sequence[MeasuredKind]) -> list[MeasuredKind]:
    """The first decode step and the last prompt: the fewest rows and the most tokens."""
    decodes = [one for one in measured if one.kind.phase == DECODE]
    prompts = [one for one in measured if one.kind.phase == PREFILL]
    return [*decodes[:1], *prompts[-1:]]


def headline(watched: Sequence[Watched], measured: Sequence[MeasuredKind], ceilings: Ceilings) -> str:
    ridge = f"the ridge is at {ridge_flop_per_byte(ceilings):.3g} operations a byte"
    decode = next((one for one in watched if one.passes.kind.phase == DECODE), None)
    if decode is None:
        least = min(one.point.operations_per_byte for one in measured)
        return f"Passes of {_digits(least)} operations a byte or more; {ridge}"
    passes, busy = decode.passes, decode.counter.busy_frac
    reads = "" if busy is None else f", while the {decode.counter.counter} reads {busy:.0%}"
    return (
        f"Decoding {passes.kind.label} does {passes.mfu_frac:.1%} of the arithmetic that this machine can do{reads}: "
        f"{_digits(passes.point.operations_per_byte)} operations a byte, and {ridge}"
    )


def _digits(value: float) -> str:
    """Three of them, never an exponent."""
    return f"{float(f'{value:.3g}'):,g}"


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _metrics(watched: Sequence[Watched]) -> dict[str, float | None]:
    shares: dict[str, float | None] = {}
    for one in watched:
        phase, busy = one.passes.kind.phase, one.counter.busy_frac
        shares[f"roofline/busy_pct.{phase}"] = None if busy is None else 100 * busy
        shares[f"roofline/mbu_pct.{phase}"] = 100 * one.passes.mbu_frac
        shares[f"roofline/mfu_pct.{phase}"] = 100 * one.passes.mfu_frac
    return shares


def _notes(measured: Sequence[MeasuredKind], watched: Sequence[Watched], ceilings: Ceilings) -> list[str]:
    off = [
        f"{one.kind} ({_digits(one.point.operations_per_byte)} for {_digits(one.articles_intensity)})"
        for one in measured
        if abs(one.articles_intensity / one.point.operations_per_byte - 1) > AGREES_FRAC
    ]
    notes = [
        f"the ridge: {ceilings.gemm_gflop_s:,.0f} GFLOP/s / {ceilings.read_gb_s:,.1f} GB/s = "
        f"{ridge_flop_per_byte(ceilings):.3g} operations a byte; below it memory is the limit, above it arithmetic",
        "the articles count weights alone, 2 operations each for a token; the cache, attention, and a head that runs "
        f"on a prompt's last token only move this by more than {AGREES_FRAC:.0%} "
        + (f"for: {', '.join(off)}" if off else "for none of these passes"),
    ]
    if any(one.counter.busy_frac is None for one in watched):
        notes.append("the counter can't be read here: torch.cuda.utilization needs the package nvidia-ml-py")
    return notes


def _table(found: Sequence[tuple[MeasuredKind, Timing]]) -> Rows:
    return [
        [
            "pass",
            "time, ms [quartiles]",
            "first, ms",
            "ops/byte",
            "articles",
            "GFLOP/s",
            "MFU",
            "GB/s",
            "MBU",
            "limit by theory",
        ],
        *(
            [
                str(one.kind),
                str(timing),
                f"{timing.first_ms:.1f}",
                _digits(one.point.operations_per_byte),
                _digits(one.articles_intensity),
                f"{one.point.gflop_s:.3g}",
                f"{one.mfu_frac:.1%}",
                f"{one.point.gb_s:.3g}",
                f"{one.mbu_frac:.0%}",
                f"{one.theory.limit}, {1e3 * one.theory.seconds:.3g} ms",
            ]
            for one, timing in found
        ),
    ]


def _counter_table(watched: Sequence[Watched]) -> Rows:
    return [
        ["passes", "counter", "reads", "MFU", "MBU", "mean pass, ms"],
        *(
            [
                str(one.passes.kind),
                one.counter.counter,
                "-" if one.counter.busy_frac is None else f"{one.counter.busy_frac:.0%}",
                f"{one.passes.mfu_frac:.1%}",
                f"{one.passes.mbu_frac:.0%}",
                f"{one.counter.pass_ms:.1f}",
            ]
            for one in watched
        ),
    ]
