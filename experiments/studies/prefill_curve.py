"""Reading longer and longer prompts: the linear part, attention's quadratic part, and where reading is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import (
    FLOOR_HEADING,
    agreement,
    floor_cells,
    floor_lines,
    measured_line,
    shares_of_measured,
)
from experiments.articles.lab import Floors, Lab, along
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.plots.curves import Line, Panel, curves
from experiments.roofline import mfu_frac
from experiments.theory import PrefillCurve, fit_prefill, prefill_curve

FULL_RANGE = "experiment.tokens=[16,32,64,128,256,512,1024,2048,4096,8192]"
# A rate this much below that of the next shorter prompt is more than its spread.
DIP_FRAC = 0.05


@dataclass
class PrefillCurveOptions(ArticleOptions):
    """`tokens`: lengths of prompts, each read in one pass."""

    title: ClassVar[str] = "Reading longer and longer prompts"

    tokens: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])

    def __post_init__(self) -> None:
        self.check_at_least(tokens=1)

    def measure(self, lab: Lab) -> Findings:
        found, limits = along(self.tokens, "prompt", lab.prefill)
        floors, _ = along(list(found), "prompt", lambda tokens: lab.floors(1, tokens, 0, kernels=True))
        mfu = {tokens: _mfu(lab, tokens, timing) for tokens, timing in found.items()}
        fit, counted = fitted(found), prefill_curve(lab.cost, lab.ceilings)
        title = headline(found, fit)
        return Findings(
            title,
            curves={
                "curve_prefill/ms": [(tokens, timing.median_ms) for tokens, timing in found.items()],
                "curve_prefill/tok_s": list(rates(found).items()),
            },
            metrics=_metrics(fit, max(found)),
            tables={"Reading a prompt": _table(found, floors, mfu, fit, counted)},
            figures=_figures(title, found, floors, fit),
            notes=[
                *_fit_notes(found, fit),
                *_dip_notes(found),
                agreement(found, floors),
                *_range_notes(lab, self.tokens),
            ],
            limits=limits,
        )


def rates(found: Mapping[int, Timing]) -> dict[int, float]:
    """Tokens per second by prompt length."""
    return {tokens: timing.per(tokens) for tokens, timing in found.items()}


def dips(found: Mapping[int, Timing]) -> list[int]:
    """Lengths that are read clearly more slowly, token for token, than the next shorter one."""
    return [
        tokens
        for (_, before), (tokens, rate) in pairwise(rates(found).items())
        if rate < before * (1 - DIP_FRAC)
    ]


def fitted(found: Mapping[int, Timing]) -> PrefillCurve | None:
    """None for fewer than three lengths, of which a fit would say nothing."""
    if len(found) < 3:
        return None
    return fit_prefill(list(found), [timing.median_ms / 1e3 for timing in found.values()])


def headline(found: Mapping[int, Timing], fit: PrefillCurve | None) -> str:
    speed, longest = rates(found), max(found)
    best = max(speed, key=lambda tokens: speed[tokens])
    text = f"Prompts of {best:,} tokens are read fastest, at {speed[best]:,.0f} tokens a second"
    if best != longest:
        text += f"; those of {longest:,} at {speed[longest] / speed[best]:.0%} of that"
    if fit is None:
        return text
    return (
        f"{text}; a fitted quadratic part takes {fit.quadratic_frac(longest):.0%} of {longest:,} tokens' time"
    )


def _mfu(lab: Lab, tokens: int, timing: Timing) -> float:
    event = lab.event(1, tokens, 0, end_s=timing.median_ms / 1e3)
    return mfu_frac([event], lab.cost_at(tokens), lab.ceilings) or 0.0


def _metrics(fit: PrefillCurve | None, longest: int) -> dict[str, float | None]:
    if fit is None:
        return {}
    return {
        "curve_prefill/fit_fixed_ms": 1e3 * fit.fixed_s,
        "curve_prefill/fit_linear_ms": 1e3 * fit.linear_s,
        "curve_prefill/fit_quadratic_ms": 1e3 * fit.quadratic_s,
        "curve_prefill/quadratic_frac": fit.quadratic_frac(longest),
    }


def _fit_notes(found: Mapping[int, Timing], fit: PrefillCurve | None) -> list[str]:
    if fit is None:
        return ["linear and quadratic part need at least three lengths"]
    text = (
        f"fitted, n tokens take {1e3 * fit.fixed_s:.1f} ms + {1e3 * fit.linear_s:.3g} ms x n + "
        f"{1e6 * fit.quadratic_s:.2g} us x n^2 (least squares of relative errors, no part negative)"
    )
    if fit.quadratic_s and fit.linear_s:
        text += f"; both parts would be equal at {fit.equal_tokens:,.0f} tokens"
    beside = shares_of_measured({tokens: 1e3 * fit.seconds(tokens) for tokens in found}, found)
    return [text, f"the fit is {beside}"]


def _dip_notes(found: Mapping[int, Timing]) -> list[str]:
    slower = [f"{tokens:,} ({rates(found)[tokens]:,.0f} tok/s)" for tokens in dips(found)]
    if not slower:
        return [
            f"no length is read more than {DIP_FRAC:.0%} more slowly, token for token, than the one before it"
        ]
    return [f"read more slowly, token for token, than the length before: {', '.join(slower)}"]


def _range_notes(lab: Lab, tokens: list[int]) -> list[str]:
    if max(tokens) >= min(8192, lab.context):
        return []
    return [f"shortened to {max(tokens):,} tokens; all that the articles read: {FULL_RANGE}"]


def _table(
    found: Mapping[int, Timing],
    floors: Mapping[int, Floors],
    mfu: Mapping[int, float],
    fit: PrefillCurve | None,
    counted: PrefillCurve,
) -> Rows:
    heading = [
        "tokens",
        "reading, ms [quartiles]",
        "first, ms",
        "tok/s",
        "MFU",
        "quadratic part, fitted",
        "quadratic part, counted",
        *FLOOR_HEADING,
    ]
    return [
        heading,
        *(
            [
                f"{tokens:,}",
                str(timing),
                f"{timing.first_ms:.1f}",
                f"{timing.per(tokens):,.0f}",
                f"{mfu[tokens]:.0%}",
                "-" if fit is None else f"{fit.quadratic_frac(tokens):.1%}",
                f"{counted.quadratic_frac(tokens):.1%}",
                *floor_cells(floors.get(tokens)),
            ]
            for tokens, timing in found.items()
        ),
    ]


def _figures(
    title: str, found: Mapping[int, Timing], floors: Mapping[int, Floors], fit: PrefillCurve | None
) -> dict[str, Figure | None]:
    theory = floor_lines(floors)
    if fit is not None:
        points = [(tokens, 1e3 * fit.seconds(tokens)) for tokens in found]
        theory.append(Line("fixed + linear + quadratic part, fitted", points, is_theory=True))
    time = Panel([measured_line(found), *theory], "tokens of the prompt", "time to read it, ms")
    # Tokens per second, of the same lines.
    speed = [Line("measured", list(rates(found).items()))] + [
        Line(line.label, [(tokens, 1e3 * tokens / ms) for tokens, ms in line.points], is_theory=True)
        for line in theory
    ]
    rate = Panel(speed, "tokens of the prompt", "tokens per second", log_y=False)
    return {"prefill_curve.png": curves([time, rate], title)}
