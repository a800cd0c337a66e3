"""The articles' arithmetic, published beside computed, and the two limits of a pass. Needs no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import theory
from experiments.article_values import (
    BYTES_PER_WEIGHT,
    PARAMETERS,
    PEAK,
    PROMPT_TOKENS,
    SUSTAINED,
    published_values,
)
from experiments.articles import publish
from experiments.articles.findings import Findings
from experiments.articles.page import Heading, page
from experiments.articles.study import DEFAULTS, Published, command_of, refuse_unused
from experiments.config import compose_run
from experiments.metrics import METRICS_VERSION
from experiments.plots.curves import Line, Mark, Panel, curves
from experiments.record import git_tags
from experiments.studies.base import StudyOptions
from experiments.terminal import OUT
from experiments.theory_tables import theory_tables
from experiments.tracking import Store, open_store, run

TITLE = "Theory: what a pass must cost"
PASS_TOKENS = [2**power for power in range(14)]


@dataclass
class TheoryOptions(StudyOptions):
    """Has no options: what it computes is published."""

    def prepare(self, overrides: Sequence[str]) -> Callable[[], bool]:
        refuse_unused(overrides, ["study"], self.own_name)
        study = compose_run([*DEFAULTS, *overrides]).study

        def compute() -> bool:
            self.run(study, overrides, open_store())
            return True

        return compute

    def run(self, study: str, overrides: Sequence[str], store: Store) -> Published:
        """Compute, print, and log one run."""
        heading = Heading(self.own_name, TITLE, "computed, not measured", command_of(self, overrides))
        found = findings()
        OUT.print(f"{self.own_name}: {TITLE}", markup=False)
        publish.show(found)
        tags = {
            "kind": "report",
            "experiment": self.own_name,
            "metrics_version": METRICS_VERSION,
            **git_tags(),
        }
        with run(store, study, self.own_name, tags, {}) as logged:
            publish.log(found, page(heading, found, publish.PLOTS), logged)
        OUT.print(f"logged as run {logged.run_id}")
        return Published(heading, found, logged.run_id)


def findings() -> Findings:
    """All tables, and the picture of one pass over more and more tokens."""
    values = [value for value in published_values() if value.agrees is not None]
    agreeing = sum(bool(value.agrees) for value in values)
    headline = (
        f"{agreeing} of {len(values)} published values come out as published; on an H100 that sustains "
        f"{SUSTAINED.gemm_gflop_s / 1e3:.0f} TFLOP/s a pass of an 8B model waits for memory over one token, for "
        f"arithmetic over {math.ceil(_ridge())} and more"
    )
    return Findings(
        headline,
        tables={title: [header, *rows] for title, header, rows in theory_tables()},
        figures={"theory.png": _figure(headline)},
        notes=[
            f"{PROMPT_TOKENS:,} tokens of a prompt and {SUSTAINED.gemm_gflop_s / 1e3:.0f} TFLOP/s are not published, "
            "but worked back from published times (assumed): that values with them come out shows that they agree with "
            "each other, no more",
            *(f"not as published: {value.quantity}: {value.how}" for value in values if not value.agrees),
        ],
    )


def _ridge() -> float:
    return theory.ridge_tokens(SUSTAINED, BYTES_PER_WEIGHT)


def _figure(headline: str) -> Figure | None:
    def costs(gflop_s: float) -> list[theory.PassCost]:
        return [
            theory.pass_cost(PARAMETERS, tokens, PEAK.read_gb_s, gflop_s / 1e3, BYTES_PER_WEIGHT)
            for tokens in PASS_TOKENS
        ]

    memory = [(tokens, 1e3 * cost.memory_s) for tokens, cost in zip(PASS_TOKENS, costs(1e6), strict=True)]
    lines = [Line("reading the weights", memory, is_theory=True)]
    for ceilings, what in ((SUSTAINED, "sustained, assumed"), (PEAK, "peak")):
        rate = ceilings.gemm_gflop_s
        points = [
            (tokens, 1e3 * cost.compute_s) for tokens, cost in zip(PASS_TOKENS, costs(rate), strict=True)
        ]
        lines.append(Line(f"arithmetic at {rate / 1e3:.0f} TFLOP/s ({what})", points, is_theory=True))
    panel = Panel(
        lines,
        "tokens of a pass (8e9 parameters of 16 bits, H100)",
        "time, ms",
        marks=[Mark(f"ridge: {_ridge():.0f} tokens", (_ridge(), memory[0][1]))],
    )
    return curves([panel], headline)
