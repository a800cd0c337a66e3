"""A pass over more and more tokens of one text: the slack that speculation spends, and which acceptance repays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import (
    FLOOR_HEADING,
    NO_OVERHEAD,
    agreement,
    floor_cells,
    floor_lines,
    measured_line,
    shares_of_measured,
)
from experiments.articles.lab import Floors, Lab, along
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.config import check
from experiments.metrics import break_even_acceptance
from experiments.plots.curves import Line, Panel, curves

# Tokens of a verify pass that people ask about: four drafts and the token before them.
TYPICAL_TOKENS = 5
BREAK_EVEN_LABEL = "a draft token costs {:.0%} of a step"


@dataclass
class PassCurveOptions(ArticleOptions):
    """`tokens`: of a pass; one more than drafts. `context_tokens`: cached before it.

    `draft_costs`: what drafting one token takes, as a share of a plain step; 0 is a drafter that costs nothing.
    """

    title: ClassVar[str] = "One pass over more and more tokens of a text"

    tokens: list[int] = field(
        default_factory=lambda: [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64]
    )
    context_tokens: int = 128
    draft_costs: list[float] = field(default_factory=lambda: [0.0, 0.1, 0.3])

    def __post_init__(self) -> None:
        is_right = bool(self.tokens) and min(self.tokens) == 1
        check(is_right, "experiment.tokens", self.tokens, "1, the plain step, and larger numbers")
        self.check_at_least(context_tokens=1, draft_costs=0)

    def measure(self, lab: Lab) -> Findings:
        found, limits = along(
            self.tokens, "tokens", lambda tokens: lab.one_pass(1, tokens, self.context_tokens)
        )
        floors, _ = along(
            list(found), "tokens", lambda tokens: lab.floors(1, tokens, self.context_tokens, kernels=True)
        )
        paying = break_even(found, self.draft_costs)
        title = headline(found, paying[min(self.draft_costs)], min(self.draft_costs))
        return Findings(
            title,
            curves={"curve_pass/ms": [(tokens, timing.median_ms) for tokens, timing in found.items()]},
            metrics={
                f"curve_pass/slack_x.{tokens}": slack
                for tokens, slack in slacks(found).items()
                if tokens == nearest(found)
            },
            tables={
                "One pass of one row": _table(found, floors),
                "Acceptance from which K draft tokens pay": _break_even_table(found, paying),
            },
            figures=_figures(title, found, floors, paying),
            notes=[
                "slack is the time of a pass over K + 1 tokens by that of one: what K draft tokens cost to verify; "
                "break-even is the acceptance from which drafting K tokens is faster than not drafting, if each is "
                "accepted with the same probability whatever came before (Leviathan et al. 2023)",
                _theory_note(found, floors),
                agreement(found, floors),
            ],
            limits=limits,
        )


BreakEven = Mapping[float, Mapping[int, float | None]]


def slacks(found: Mapping[int, Timing]) -> dict[int, float]:
    """The time of each pass by that of a pass over one token, the first of them."""
    plain_ms = found[min(found)].median_ms
    return {tokens: timing.median_ms / plain_ms for tokens, timing in found.items()}


def break_even(found: Mapping[int, Timing], draft_costs: Sequence[float]) -> BreakEven:
    """By cost of a draft token and number of drafts: the acceptance from which it pays, None for never."""
    return {
        cost: {
            tokens - 1: break_even_acceptance(tokens - 1, cost, slack)
            for tokens, slack in slacks(found).items()
            if tokens > 1
        }
        for cost in sorted(set(draft_costs))
    }


def nearest(found: Mapping[int, Timing]) -> int:
    """The measured pass that is nearest to `TYPICAL_TOKENS`."""
    return min(found, key=lambda tokens: abs(tokens - TYPICAL_TOKENS))


def headline(found: Mapping[int, Timing], paying: Mapping[int, float | None], draft_cost: float) -> str:
    tokens = nearest(found)
    if tokens == 1:
        return f"A pass over {tokens} tokens takes {found[tokens].median_ms:.1f} ms"
    longest = max(found)
    pays = paying[tokens - 1]
    pay = "never pay off" if pays is None else f"would pay off from an acceptance of {pays:.0%}"
    drafts = f"{tokens - 1} draft token{'' if tokens == 2 else 's'}"
    cost = f"of {draft_cost:.0%} of a step each" if draft_cost else "that cost nothing"
    text = f"A pass over {tokens} tokens takes {slacks(found)[tokens]:.2f} times as long as over one"
    if longest > tokens:
        text += f", over {longest} {slacks(found)[longest]:.1f} times"
    return f"{text}; {drafts} {cost} {pay}"


def _floor_with_overhead(floors: Mapping[int, Floors]) -> dict[int, float]:
    """Where the overhead is known."""
    predicted = {tokens: floor.with_overhead_ms for tokens, floor in floors.items()}
    return {tokens: ms for tokens, ms in predicted.items() if ms is not None}


def _theory_note(found: Mapping[int, Timing], floors: Mapping[int, Floors]) -> str:
    predicted = _floor_with_overhead(floors)
    if not predicted:
        return NO_OVERHEAD
    beside = shares_of_measured(predicted, found)
    return f"the longer of reading and arithmetic, with the overhead of a pass, predicts {beside}"


def _table(found: Mapping[int, Timing], floors: Mapping[int, Floors]) -> Rows:
    predicted = _floor_with_overhead(floors)
    return [
        ["tokens", "pass, ms [quartiles]", "first, ms", "slack", *FLOOR_HEADING, "floor + overhead, ms"],
        *(
            [
                str(tokens),
                str(timing),
                f"{timing.first_ms:.1f}",
                f"{slacks(found)[tokens]:.2f}x",
                *floor_cells(floors.get(tokens)),
                f"{predicted[tokens]:.1f}" if tokens in predicted else "-",
            ]
            for tokens, timing in found.items()
        ),
    ]


def _break_even_table(found: Mapping[int, Timing], paying: BreakEven) -> Rows:
    heading = [f"a draft costs {cost:.0%} of a step" for cost in paying]
    return [
        ["K", "verify pass / plain pass", *heading],
        *(
            [
                str(tokens - 1),
                f"{slack:.2f}x",
                *(
                    "never" if rates[tokens - 1] is None else f"{rates[tokens - 1]:.0%}"
                    for rates in paying.values()
                ),
            ]
            for tokens, slack in slacks(found).items()
            if tokens > 1
        ),
    ]


def _figures(
    title: str, found: Mapping[int, Timing], floors: Mapping[int, Floors], paying: BreakEven
) -> dict[str, Figure | None]:
    with_overhead = list(_floor_with_overhead(floors).items())
    theory = [
        *floor_lines(floors),
        Line("hardware floor + overhead of a pass", with_overhead, is_theory=True),
    ]
    time = Panel([measured_line(found), *theory], "tokens of the pass", "time of the pass, ms")
    rates = [
        Line(BREAK_EVEN_LABEL.format(cost), [(k, 100 * rate) for k, rate in by_k.items() if rate is not None])
        for cost, by_k in paying.items()
    ]
    acceptance = Panel(rates, "draft tokens, K", "acceptance from which K draft tokens pay, %", log_y=False)
    return {"pass_curve.png": curves([time, acceptance], title)}
