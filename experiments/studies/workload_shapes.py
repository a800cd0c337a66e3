"""What a request takes by its shape: chat writes, a question about a document reads; predicted, then measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments import theory
from experiments.articles.checks import at_least
from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import AGREES_FRAC
from experiments.articles.lab import Lab, LimitError, along
from experiments.articles.request_law import LEAST_LENGTHS, RequestLaw, Shape
from experiments.articles.steps import decode_steps
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.plots.curves import Line, Panel, curves
from experiments.plots.shares import ShareBar, shares
from experiments.theory import RequestTime

SHAPES = ("chat", "document", "inverted")


@dataclass
class WorkloadShapesOptions(ArticleOptions):
    """`chat`, `document`, `inverted`: tokens of prompt and answer; those beyond `most_seconds` are predicted only.

    `prompts`: lengths that reading is timed at, `contexts`: those behind which a step is, both for the prediction.
    """

    title: ClassVar[str] = "Short questions and long documents: where a request's time goes"

    chat: list[int] = field(default_factory=lambda: [64, 192])
    document: list[int] = field(default_factory=lambda: [1024, 32])
    inverted: list[int] = field(default_factory=lambda: [100_000, 50])
    prompts: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512, 1024, 2048])
    contexts: list[int] = field(default_factory=lambda: [64, 512, 2048])
    repeats: int = 2
    most_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in SHAPES:
            at_least(self, 2, name)
            if len(getattr(self, name)) != 2:
                raise ValueError(
                    f"experiment.{name}={getattr(self, name)}: expected tokens of prompt and answer"
                )
        at_least(self, 1, "prompts", "contexts", "repeats")
        at_least(self, 0, "most_seconds")
        if len(set(self.prompts)) < LEAST_LENGTHS:
            raise ValueError(f"experiment.prompts={self.prompts}: expected at least {LEAST_LENGTHS} lengths")

    def measure(self, lab: Lab) -> Findings:
        reads, limits = along(self.prompts, "read", lab.prefill)
        if len(reads) < LEAST_LENGTHS:
            raise LimitError(f"{'; '.join(limits)}: a prediction needs {LEAST_LENGTHS} lengths of prompts")
        steps, more = along(self.contexts, "context", lambda context: lab.one_pass(1, 1, context))
        law = RequestLaw.fitted(reads, steps)
        shapes = {name: Shape(name, *getattr(self, name)) for name in SHAPES}
        predicted = {name: law.predict(shape) for name, shape in shapes.items()}
        measured: dict[str, RequestTime] = {}
        for name, shape in shapes.items():
            try:
                measured[name] = self._measure(lab, shape, predicted[name])
            except LimitError as limit:
                more[str(shape)] = str(limit)
        cost = replace(lab.cost, kv_row_bytes=())  # a row's bytes are known within the context only
        floors = {
            name: theory.predicted_request(cost, lab.ceilings, shape.prompt_tokens, shape.new_tokens)
            for name, shape in shapes.items()
        }
        headline = _headline(shapes, predicted, measured)
        return Findings(
            headline,
            curves={
                "curve_prefill/ms": [(tokens, timing.median_ms) for tokens, timing in reads.items()],
                "curve_prefill/tok_s": [(tokens, timing.per(tokens)) for tokens, timing in reads.items()],
                "curve_context/step_ms": [(context, timing.median_ms) for context, timing in steps.items()],
            },
            metrics={
                f"workload_shapes/{name}_{what}": value
                for kind, times in (("predicted_", predicted), ("", measured))
                for name, request in times.items()
                for what, value in (
                    (f"{kind}total_s", request.total_s),
                    (f"{kind}prefill_frac", request.prefill_frac),
                )
            },
            tables={"Predicted and measured": _table(shapes, predicted, measured, floors)},
            figures=_figures(headline, shapes, predicted, measured, law, reads, steps),
            notes=_notes(law, shapes, predicted, measured, max(reads)),
            limits=limits | more,
        )

    def _measure(self, lab: Lab, shape: Shape, predicted: RequestTime) -> RequestTime:
        """Medians of whole requests, after one that is not counted."""
        if predicted.total_s > self.most_seconds:
            raise LimitError(
                f"predicted to take {predicted.total_s:.0f} s, longer than experiment.most_seconds"
            )
        runs = [decode_steps(lab, 1, shape.prompt_tokens, shape.new_tokens) for _ in range(self.repeats + 1)][
            1:
        ]
        return RequestTime(
            median(run.prefill_ms for run in runs) / 1e3,
            median(sum(step.ms for step in run.steps) - run.prefill_ms for run in runs) / 1e3,
        )


def _headline(
    shapes: Mapping[str, Shape], predicted: Mapping[str, RequestTime], measured: Mapping[str, RequestTime]
) -> str:
    def says(name: str) -> str:
        frac = measured.get(name, predicted[name]).prefill_frac
        return f"{frac:.0%} of {shapes[name]}{'' if name in measured else ', predicted'}"

    return f"Reading is {', '.join(map(says, shapes))}"


def _notes(
    law: RequestLaw,
    shapes: Mapping[str, Shape],
    predicted: Mapping[str, RequestTime],
    measured: Mapping[str, RequestTime],
    longest: int,
) -> list[str]:
    prefill = law.prefill
    notes = [
        f"predicted from a prompt's {1e3 * prefill.fixed_s:.3g} ms + {1e3 * prefill.linear_s:.3g} ms a token + "
        f"{1e9 * prefill.quadratic_s:.3g} ns a token squared, and a step's {law.step_fixed_ms:.3g} ms + "
        f"{1e3 * law.step_slope_ms:.3g} us a token of context"
    ]
    notes += [
        f"{shape}: {shape.prompt_tokens / longest:.0f} times the longest prompt that was timed, so its prediction is "
        f"an extrapolation, {prefill.quadratic_frac(shape.prompt_tokens):.0%} of its reading the quadratic part"
        for shape in shapes.values()
        if shape.prompt_tokens > longest
    ]
    ratios = {name: predicted[name].total_s / request.total_s for name, request in measured.items()}
    if ratios:
        off = [name for name, ratio in ratios.items() if abs(ratio - 1) > AGREES_FRAC]
        notes.append(
            f"predicted totals are {min(ratios.values()):.2f} to {max(ratios.values()):.2f} of measured ones: "
            + (f"off by more than {AGREES_FRAC:.0%} for {', '.join(off)}" if off else "close everywhere")
        )
    return notes


def _table(
    shapes: Mapping[str, Shape],
    predicted: Mapping[str, RequestTime],
    measured: Mapping[str, RequestTime],
    floors: Mapping[str, RequestTime],
) -> Rows:
    columns = {"predicted": predicted, "measured": measured, "hardware floor": floors}
    heading = ["tokens", *(f"{name}: {what}" for name in columns for what in ("total, s", "reading"))]
    return [
        heading,
        *(
            [
                str(shape),
                *(
                    cell
                    for times in columns.values()
                    for cell in (
                        (f"{times[name].total_s:.3g}", f"{times[name].prefill_frac:.0%}")
                        if name in times
                        else ("-", "-")
                    )
                ),
            ]
            for name, shape in shapes.items()
        ),
    ]


def _figures(
    headline: str,
    shapes: Mapping[str, Shape],
    predicted: Mapping[str, RequestTime],
    measured: Mapping[str, RequestTime],
    law: RequestLaw,
    reads: Mapping[int, Timing],
    steps: Mapping[int, Timing],
) -> dict[str, Figure | None]:
    bars = [
        ShareBar(
            f"{shape}\n{'predicted' if times is predicted else 'measured'}",
            {"reading": times[name].prefill_s, "writing": times[name].decode_s},
            f"{times[name].total_s:.3g} s",
            is_theory=times is predicted,
        )
        for name, shape in shapes.items()
        for times in (predicted, measured)
        if name in times
    ]
    longest = max(shapes.values(), key=lambda shape: shape.prompt_tokens).prompt_tokens
    prefill = Panel(
        [
            Line("measured", [(tokens, timing.median_ms) for tokens, timing in reads.items()]),
            _fitted(reads, longest, lambda tokens: 1e3 * law.prefill.seconds(tokens)),
        ],
        "tokens of the prompt",
        "time to read it, ms",
    )
    step = Panel(
        [
            Line("measured", [(context, timing.median_ms) for context, timing in steps.items()]),
            _fitted(steps, longest, law.step_ms),
        ],
        "tokens of context",
        "time of a step behind them, ms",
    )
    law_title = (
        f"Reading {longest:,} tokens is predicted to take {law.prefill.seconds(longest):.3g} s, "
        f"a step behind them {law.step_ms(longest):.3g} ms"
    )
    return {
        "workload_shapes.png": shares(bars, headline, "share of the request's time, %"),
        "request_law.png": curves([prefill, step], law_title),
    }


def _fitted(measured: Mapping[int, Timing], longest: int, law_ms: Callable[[float], float]) -> Line:
    """A bent line on logarithmic axes needs more points than its ends."""
    lengths = np.geomspace(min(measured), max([*measured, longest]), 60)
    return Line("fitted", [(float(length), law_ms(length)) for length in lengths], is_theory=True)
