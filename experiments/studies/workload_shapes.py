"""What a request takes by its shape: chat writes, a question about a document reads; predicted, then measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments import theory
from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import AGREES_FRAC, measured_line
from experiments.articles.lab import BEYOND_CONTEXT, Lab, LimitError, along
from experiments.articles.request_law import LEAST_LENGTHS, RequestLaw, Shape
from experiments.articles.steps import decode_steps
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.plots.curves import Line, Panel, curves
from experiments.plots.shares import ShareBar, shares
from experiments.theory import RequestTime

SHAPES = ("chat", "document", "inverted")


@dataclass(frozen=True)
class Outcome:
    """A request of a shape: as predicted, as measured again and again (if it could be), and its hardware floor."""

    shape: Shape
    predicted: RequestTime
    runs: Sequence[RequestTime]
    floor: RequestTime

    @property
    def measured(self) -> RequestTime | None:
        """Medians of both phases."""
        if not self.runs:
            return None
        return RequestTime(
            median(run.prefill_s for run in self.runs), median(run.decode_s for run in self.runs)
        )

    @property
    def range_s(self) -> str:
        """The least and the most that a whole one took."""
        totals_s = [run.total_s for run in self.runs]
        return f"{seconds(min(totals_s))} to {seconds(max(totals_s))}" if totals_s else "-"


@dataclass
class WorkloadShapesOptions(ArticleOptions):
    """`chat`, `document`, `inverted`: tokens of prompt and answer; those beyond `most_seconds` are predicted only.

    `prompts`: lengths that reading is timed at, `contexts`: those behind which a step is, both for the prediction.
    """

    title: ClassVar[str] = "Short questions and long documents: where a request's time goes"
    uses: ClassVar[Sequence[str]] = ("workload",)

    chat: list[int] = field(default_factory=lambda: [64, 192])
    document: list[int] = field(default_factory=lambda: [1024, 32])
    inverted: list[int] = field(default_factory=lambda: [100_000, 50])
    prompts: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512, 1024, 2048])
    contexts: list[int] = field(default_factory=lambda: [64, 512, 2048])
    repeats: int = 2
    most_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.check_at_least(chat=2, document=2, inverted=2, prompts=1, contexts=1, repeats=1, most_seconds=0)
        for name in SHAPES:
            lengths = getattr(self, name)
            if len(lengths) != 2:
                raise ValueError(f"experiment.{name}={lengths}: expected tokens of prompt and answer")
        if len(set(self.prompts)) < LEAST_LENGTHS:
            raise ValueError(f"experiment.prompts={self.prompts}: expected at least {LEAST_LENGTHS} lengths")

    def measure(self, lab: Lab) -> Findings:
        reads, missing = along(self.prompts, "read", lab.prefill)
        if len(reads) < LEAST_LENGTHS:
            raise LimitError(f"{missing}: a prediction needs {LEAST_LENGTHS} lengths of prompts")
        steps, more = along(self.contexts, "context", lambda context: lab.one_pass(1, 1, context))
        missing |= more
        law = RequestLaw.fitted(reads, steps)
        outcomes = [self._outcome(lab, Shape(name, *getattr(self, name)), law, missing) for name in SHAPES]
        headline = f"Reading takes, of a request's time, {', '.join(map(_reading, outcomes))}"
        return Findings(
            headline,
            curves={
                "curve_prefill/ms": [(tokens, timing.median_ms) for tokens, timing in reads.items()],
                "curve_prefill/tok_s": [(tokens, timing.per(tokens)) for tokens, timing in reads.items()],
                "curve_context/step_ms": [(context, timing.median_ms) for context, timing in steps.items()],
            },
            metrics={
                f"workload_shapes/{outcome.shape.name}_{what}": value
                for outcome in outcomes
                for what, value in _metrics(outcome).items()
            },
            tables={"Predicted and measured": _table(outcomes)},
            figures=_figures(headline, outcomes, law, reads, steps),
            notes=_notes(outcomes, law, max(reads)),
            limits=missing,
        )

    def _outcome(self, lab: Lab, shape: Shape, law: RequestLaw, missing: dict[str, str]) -> Outcome:
        predicted = law.predict(shape)
        runs: Sequence[RequestTime] = ()
        try:
            runs = self._measured(lab, shape, predicted)
        except LimitError as limit:
            missing[shape.name] = str(limit)
        cost = replace(lab.cost, kv_row_bytes=())  # which are known within the context only
        floor = theory.predicted_request(cost, lab.ceilings, shape.prompt_tokens, shape.new_tokens)
        return Outcome(shape, predicted, runs, floor)

    def _measured(self, lab: Lab, shape: Shape, predicted: RequestTime) -> list[RequestTime]:
        """Whole requests, after one that is not counted. Raises LimitError."""
        if shape.prompt_tokens + shape.new_tokens > lab.context:
            raise LimitError(BEYOND_CONTEXT)
        if predicted.total_s > self.most_seconds:
            raise LimitError(
                f"predicted to take {seconds(predicted.total_s)}, experiment.most_seconds is {self.most_seconds:g}"
            )
        runs = [decode_steps(lab, 1, shape.prompt_tokens, shape.new_tokens) for _ in range(self.repeats + 1)]
        return [
            RequestTime(run.prefill_ms / 1e3, (sum(step.ms for step in run.steps) - run.prefill_ms) / 1e3)
            for run in runs[1:]
        ]


def _reading(outcome: Outcome) -> str:
    time, how = outcome.measured or outcome.predicted, "" if outcome.measured else " (predicted)"
    return f"{time.prefill_frac:.0%} for {outcome.shape.name}{how}"


def _metrics(outcome: Outcome) -> dict[str, float]:
    found = {"predicted_": outcome.predicted, "": outcome.measured}
    return {
        f"{how}{what}": value
        for how, time in found.items()
        if time is not None
        for what, value in (("total_s", time.total_s), ("prefill_frac", time.prefill_frac))
    }


def _table(outcomes: Sequence[Outcome]) -> Rows:
    def cells(time: RequestTime | None) -> list[str]:
        return ["-", "-"] if time is None else [seconds(time.total_s), f"{time.prefill_frac:.0%}"]

    heading = ["tokens", "predicted", "reading", "measured", "reading", "range", "hardware floor", "reading"]
    return [
        heading,
        *(
            [str(one.shape), *cells(one.predicted), *cells(one.measured), one.range_s, *cells(one.floor)]
            for one in outcomes
        ),
    ]


def _notes(outcomes: Sequence[Outcome], law: RequestLaw, longest: int) -> list[str]:
    prefill = law.prefill
    notes = [
        f"predicted from a prompt's {1e3 * prefill.fixed_s:.3g} ms + {1e3 * prefill.linear_s:.3g} ms a token + "
        f"{1e9 * prefill.quadratic_s:.3g} ns a token squared, and a step's {law.step_fixed_ms:.3g} ms + "
        f"{1e3 * law.step_slope_ms:.3g} us a token of context"
    ]
    notes += [
        f"{one.shape}: {one.shape.prompt_tokens / longest:.3g} times the longest prompt that was timed, so its "
        f"prediction goes beyond what was seen; {prefill.quadratic_frac(one.shape.prompt_tokens):.0%} of its "
        "reading is the quadratic part"
        for one in outcomes
        if one.shape.prompt_tokens > longest
    ]
    ratios = {one.shape: one.predicted.total_s / one.measured.total_s for one in outcomes if one.measured}
    if ratios:
        off = [str(shape) for shape, ratio in ratios.items() if abs(ratio - 1) > AGREES_FRAC]
        within = f"off by more than {AGREES_FRAC:.0%} for {', '.join(off)}" if off else "close everywhere"
        spread = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
        notes.append(f"predicted totals are {spread} of measured ones: {within}")
    return notes


def _figures(
    headline: str,
    outcomes: Sequence[Outcome],
    law: RequestLaw,
    reads: Mapping[int, Timing],
    steps: Mapping[int, Timing],
) -> dict[str, Figure | None]:
    bars = [
        ShareBar(
            f"{one.shape}\n{how}",
            {"reading": time.prefill_s, "writing": time.decode_s},
            seconds(time.total_s),
            is_theory=time is one.predicted,
        )
        for one in outcomes
        for how, time in (("predicted", one.predicted), ("measured", one.measured))
        if time is not None
    ]
    longest = max(one.shape.prompt_tokens for one in outcomes)
    fitted_prefill = _fitted(reads, longest, lambda tokens: 1e3 * law.prefill.seconds(tokens))
    fitted_step = _fitted(steps, longest, law.step_ms)
    law_title = (
        f"Reading {longest:,} tokens is predicted to take {seconds(law.prefill.seconds(longest))}, "
        f"a step behind them {law.step_ms(longest):.3g} ms"
    )
    panels = [
        Panel([measured_line(reads), fitted_prefill], "tokens of the prompt", "time to read it, ms"),
        Panel([measured_line(steps), fitted_step], "tokens of context", "time of a step behind them, ms"),
    ]
    return {
        "workload_shapes.png": shares(bars, headline, "share of the request's time, %"),
        "request_law.png": curves(panels, law_title),
    }


def seconds(value: float) -> str:
    """Three digits, or all of the whole ones."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _fitted(measured: Mapping[int, Timing], longest: int, law_ms: Callable[[float], float]) -> Line:
    """A bent line on logarithmic axes needs more points than its ends."""
    lengths = np.geomspace(min(measured), max([*measured, longest]), 60)
    return Line("fitted", [(float(length), law_ms(length)) for length in lengths], is_theory=True)
