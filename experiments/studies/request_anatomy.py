"""One real question, step by step: what its prompt took, what each token took, and that they add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from matplotlib.figure import Figure

from experiments import theory
from experiments.articles.anatomy import Anatomy, anatomies
from experiments.articles.findings import Findings, Rows
from experiments.articles.lab import BEYOND_CONTEXT, Lab, LimitError, limits
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import with_quartiles
from experiments.plots.curves import Line, Panel, curves
from experiments.plots.timeline import request_timeline
from experiments.workloads.base import Prompt, encode
from specdec.types import Request

# Nobody reads more of them.
MOST_ROWS = 32


@dataclass
class RequestAnatomyOptions(ArticleOptions):
    """`question`: what the model is asked; `new_tokens`: the most it answers; `repeats`: how often it is measured."""

    title: ClassVar[str] = "One question, step by step"
    decodes: ClassVar[bool] = True
    ends: ClassVar[bool] = True

    question: str = "What is the capital of France?"
    new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError(f"experiment.question={self.question!r}: expected a question")
        self.check_at_least(new_tokens=1, repeats=1)

    def measure(self, lab: Lab) -> Findings:
        tokenizer: Any = lab.point.pool.tokenizer
        prompt_ids = encode(Prompt("question", "question", text=self.question), tokenizer)
        new_tokens = min(self.new_tokens, lab.context - len(prompt_ids))
        if new_tokens < 1:
            raise LimitError(f"a question of {len(prompt_ids)} tokens: {BEYOND_CONTEXT}")
        request = Request(0, tuple(prompt_ids), new_tokens)
        decoder = lab.decoder(1, request.max_length, stops=True)
        with limits():
            first, *runs = anatomies(decoder, request, self.repeats + 1)
        usual = sorted(runs, key=lambda run: run.outer_ms)[len(runs) // 2]
        cost = lab.cost_at(request.max_length)
        floors_ms = [
            1e3 * sum(theory.cost_of(event, cost, lab.ceilings).seconds for event in events)
            for events in usual.target_passes
        ]
        tpots_ms = [run.metrics.tpot_ms for run in runs if run.metrics.tpot_ms is not None]
        worst_pct = 100 * max(abs(run.error_frac) for run in runs)
        headline = _headline(usual)
        return Findings(
            headline,
            curves={"trace/step_ms": usual.positions_ms},
            metrics={
                "latency/ttft_ms.p50": median(run.metrics.ttft_ms for run in runs),
                "latency/tpot_ms.p50": median(tpots_ms) if tpots_ms else None,
                "latency/total_s.p50": median(run.outer_ms for run in runs) / 1e3,
                "latency/identity_error_pct.max": worst_pct,
            },
            tables={
                "Total = TTFT + (n - 1) x ITL": _identity(usual),
                "Step by step": _steps(usual, floors_ms, tokenizer),
            },
            figures=_figures(headline, usual, floors_ms),
            notes=[
                f"asked: {self.question!r}; answered: {tokenizer.decode(usual.timeline.token_ids)!r}",
                f"the one of median length of {len(runs)} runs, which took "
                f"{with_quartiles([run.outer_ms for run in runs])} ms; the first of this process, before them, took "
                f"{first.outer_ms:.0f} ms, {first.metrics.ttft_ms:.0f} ms of them to its first token",
                f"in these runs the sum is off the outer clock by at most {worst_pct:.2f} %: closing the request "
                "behind its last token is what it leaves out",
                "theory: the target's passes at the measured ceilings, without overhead",
            ],
            limits={} if new_tokens == self.new_tokens else {f"answer {self.new_tokens}": BEYOND_CONTEXT},
        )


def _headline(found: Anatomy) -> str:
    read_frac = found.metrics.ttft_ms / found.outer_ms
    reading = found.target_passes[0]
    prompt_tokens = sum(sum(event.counts) for event in reading)
    num_passes = sum(event.num_passes for event in reading)
    how = "at once" if num_passes == 1 else f"in {num_passes} passes"
    return (
        f"Reading the question, {prompt_tokens} tokens {how}, took {read_frac:.0%} of {found.outer_ms:.0f} ms; "
        f"the other {found.later_tokens} tokens of the answer came in {len(found.trace.steps) - 1} steps"
    )


def _identity(found: Anatomy) -> Rows:
    tpot_ms = found.metrics.tpot_ms
    return [
        ["TTFT, ms", "n - 1", "ITL, ms", "TTFT + (n - 1) x ITL, ms", "outer clock, ms", "off by"],
        [
            f"{found.metrics.ttft_ms:.2f}",
            str(found.later_tokens),
            "-" if tpot_ms is None else f"{tpot_ms:.2f}",
            f"{found.sum_ms:.2f}",
            f"{found.outer_ms:.2f}",
            f"{100 * found.error_frac:.3f} %",
        ],
    ]


def _steps(found: Anatomy, floors_ms: Sequence[float], tokenizer: Any) -> Rows:
    heading = ["step", "phase", "tokens of the pass", "written", "ms", "share", "hardware floor, ms"]
    rows = [heading]
    for number, (step, events) in enumerate(zip(found.trace.steps, found.target_passes, strict=True)):
        (tokens,) = step.output.committed
        ms = 1e3 * step.duration_s
        rows.append(
            [
                str(number),
                str(step.output.phase),
                str(sum(sum(event.counts) for event in events)),
                repr(tokenizer.decode(tokens)),
                f"{ms:.2f}",
                f"{ms / found.outer_ms:.1%}",
                f"{floors_ms[number]:.2f}",
            ]
        )
    left_out = len(rows) - 1 - MOST_ROWS
    return rows if left_out <= 0 else [*rows[: MOST_ROWS + 1], [f"{left_out} more", *[""] * 6]]


def _figures(headline: str, found: Anatomy, floors_ms: Sequence[float]) -> dict[str, Figure | None]:
    ends = [end for end, _ in found.positions_ms]
    tokens = [sum(sum(event.counts) for event in events) for events in found.target_passes]
    floor = Line("hardware floor", list(zip(ends, floors_ms, strict=True)), is_theory=True)
    position = "output position (1 is the prefill's)"
    return {
        "request_anatomy.png": curves(
            [
                Panel(
                    [Line("measured", found.positions_ms), floor],
                    position,
                    "time of the step, ms",
                    False,
                    False,
                ),
                Panel(
                    [Line("measured", list(zip(ends, tokens, strict=True)))],
                    position,
                    "tokens in the target's pass",
                    log_x=False,
                ),
            ],
            headline,
        ),
        "request_timeline.png": request_timeline([found.trace], 0, headline),
    }
