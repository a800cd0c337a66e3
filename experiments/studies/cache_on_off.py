"""Writing with and without the KV cache: the same passes, but each over one token or over the whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from matplotlib.figure import Figure

from experiments import theory
from experiments.articles.findings import Findings, Rows
from experiments.articles.lab import BEYOND_CONTEXT, CACHED, Lab, LimitError
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import with_quartiles
from experiments.measure import measure
from experiments.plots.curves import Line, Panel, curves
from experiments.trace import PassEvent, Trace
from specdec.types import Request

ON, OFF = "with the cache", "without"
LEAST_NEW_TOKENS = 3  # a first and a last step behind the first token
METHODS = {ON: CACHED, OFF: "no_cache"}


@dataclass(frozen=True)
class Cost:
    """Writing one text: time and tokens read of each step behind the first token, by output position.

    `totals_ms` are the sums of all steps, one for each repeat.
    """

    ms: Sequence[float]
    tokens: Sequence[int]
    totals_ms: Sequence[float]
    token_ids: tuple[int, ...]

    @property
    def total_ms(self) -> float:
        return median(self.totals_ms)


@dataclass
class CacheOnOffOptions(ArticleOptions):
    """`new_tokens` are written behind `prompt_tokens`, `repeats` times each way, in turn."""

    title: ClassVar[str] = "With and without the KV cache"
    uses: ClassVar[Sequence[str]] = ("workload",)

    prompt_tokens: int = 32
    new_tokens: int = 160
    repeats: int = 3

    def __post_init__(self) -> None:
        self.check_at_least(prompt_tokens=1, new_tokens=LEAST_NEW_TOKENS, repeats=1)

    def measure(self, lab: Lab) -> Findings:
        new_tokens = min(self.new_tokens, lab.context - self.prompt_tokens)
        if new_tokens < LEAST_NEW_TOKENS:
            raise LimitError(f"prompt {self.prompt_tokens}: {BEYOND_CONTEXT}")
        (request,) = lab.real_requests(1, self.prompt_tokens, new_tokens)
        decoders = {
            name: lab.varied(decoding=decoding).decoder(1, request.max_length)
            for name, decoding in METHODS.items()
        }
        traces = measure(decoders, [[request]], repeats=self.repeats, seed=lab.point.config.seed)
        costs = {name: cost_of([trace for trace in traces if trace.arm == name]) for name in METHODS}
        slower = costs[OFF].total_ms / costs[ON].total_ms
        more = sum(costs[OFF].tokens) / sum(costs[ON].tokens)
        headline = (
            f"Writing {new_tokens} tokens without the cache reads {more:.0f} times as many tokens "
            f"and takes {slower:.1f} times as long"
        )
        positions = range(1, new_tokens)
        return Findings(
            headline,
            curves={
                "trace/step_ms": list(zip(positions, costs[ON].ms, strict=True)),
                "curve_cache/on_ms": list(zip(positions, costs[ON].ms, strict=True)),
                "curve_cache/off_ms": list(zip(positions, costs[OFF].ms, strict=True)),
                "curve_cache/off_pass_tokens": list(zip(positions, costs[OFF].tokens, strict=True)),
            },
            metrics={
                "curve_cache/on_total_ms": costs[ON].total_ms,
                "curve_cache/off_total_ms": costs[OFF].total_ms,
            },
            tables={"Behind the first token": _table(costs, request)},
            figures=_figures(costs, headline, request),
            notes=[
                "theory: the cache spares arithmetic, not passes; without it step i reads the prompt and i tokens, "
                "n x prompt + n^2/2 in all",
                _text_note(costs),
            ],
            limits={} if new_tokens == self.new_tokens else {f"write {self.new_tokens}": BEYOND_CONTEXT},
        )


def cost_of(traces: Sequence[Trace]) -> Cost:
    """Of repeats of one text: medians by position; the tokens of a pass are those of any repeat."""
    later = [trace.steps[1:] for trace in traces]
    first = traces[0]
    return Cost(
        ms=[median(1e3 * step.duration_s for step in steps) for steps in zip(*later, strict=True)],
        tokens=[_tokens(step.start_s, step.end_s, first.passes) for step in first.steps[1:]],
        totals_ms=[1e3 * sum(step.duration_s for step in steps) for steps in later],
        token_ids=tuple(token for step in first.steps for token in step.output.committed[0]),
    )


def _tokens(start_s: float, end_s: float, passes: Sequence[PassEvent]) -> int:
    return sum(sum(event.counts) for event in passes if start_s <= event.start_s < end_s)


def _table(costs: Mapping[str, Cost], request: Request) -> Rows:
    prompt = len(request.prompt_ids)
    # All but the first pass, which reads the prompt either way.
    counted = {
        name: theory.tokens_processed(prompt, request.max_new_tokens, is_cached=name == ON) - prompt
        for name in METHODS
    }
    heading = [
        "",
        "passes",
        "tokens read",
        "in theory",
        "first step, ms",
        "last step, ms",
        "in all, ms [quartiles]",
    ]
    return [
        heading,
        *(
            [
                name,
                str(len(cost.tokens)),
                f"{sum(cost.tokens):,}",
                f"{counted[name]:,}",
                f"{cost.ms[0]:.1f}",
                f"{cost.ms[-1]:.1f}",
                with_quartiles(cost.totals_ms),
            ]
            for name, cost in costs.items()
        ),
    ]


def _text_note(costs: Mapping[str, Cost]) -> str:
    on, off = (costs[name].token_ids for name in (ON, OFF))
    same = next((place for place, pair in enumerate(zip(on, off, strict=True)) if pair[0] != pair[1]), None)
    if same is None:
        return "both wrote the same text"
    return f"the texts are the same up to token {same}: passes of other shapes round otherwise"


def _figures(costs: Mapping[str, Cost], headline: str, request: Request) -> dict[str, Figure | None]:
    positions = range(1, request.max_new_tokens)
    prompt = len(request.prompt_ids)
    time = Panel(
        [Line(name, list(zip(positions, cost.ms, strict=True))) for name, cost in costs.items()],
        "output position",
        "time of a step, ms",
        log_x=False,
        log_y=False,
    )
    tokens = Panel(
        [
            *(Line(name, list(zip(positions, cost.tokens, strict=True))) for name, cost in costs.items()),
            Line(
                "theory: prompt + position",
                [(place, prompt + place) for place in positions],
                is_theory=True,
            ),
        ],
        "output position",
        "tokens read by a step",
        log_x=False,
        log_y=False,
    )
    return {"cache_on_off.png": curves([time, tokens], headline)}
