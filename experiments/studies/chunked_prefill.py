"""A long prompt beside rows that decode: the smaller its chunks the less they wait, and the later its first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from matplotlib.figure import Figure

from experiments import theory
from experiments.articles.findings import Findings, Rows
from experiments.articles.interleaving import Arrivals, arrivals
from experiments.articles.lab import Lab, along
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import with_quartiles
from experiments.plots.curves import Line, Panel, curves


@dataclass
class ChunkedPrefillOptions(ArticleOptions):
    """`prompt_tokens`: of the new request; `chunks`: how many are read at once, as many as there are for larger ones.

    `rows` others, behind `context` tokens each, decode meanwhile. `repeats`: how often each chunk size is tried.
    """

    title: ClassVar[str] = "A long prompt is read while others decode"

    prompt_tokens: int = 1024
    chunks: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512, 1024])
    rows: int = 4
    context: int = 128
    repeats: int = 4

    def __post_init__(self) -> None:
        self.check_at_least(prompt_tokens=2, chunks=1, rows=1, context=1, repeats=1)

    def measure(self, lab: Lab) -> Findings:
        chunks = {min(chunk, self.prompt_tokens) for chunk in self.chunks} | {self.prompt_tokens}
        found, limits = along(
            sorted(chunks),
            "chunk",
            lambda chunk: arrivals(lab, self.rows, self.context, self.prompt_tokens, chunk, self.repeats),
        )
        floors = {chunk: self._floor(lab, chunk) for chunk in found}
        headline = _headline(found, self.prompt_tokens)
        return Findings(
            headline,
            curves={
                "curve_chunk/ttft_ms": [(chunk, at.ttft_ms) for chunk, at in found.items()],
                "curve_chunk/step_gap_ms.max": [(chunk, at.longest_gap_ms) for chunk, at in found.items()],
                "curve_chunk/step_gap_ms.p50": [(chunk, at.median_gap_ms) for chunk, at in found.items()],
            },
            metrics={"curve_chunk/best_balance_tokens": balanced(found)},
            tables={f"{self.prompt_tokens} tokens read beside {self.rows} rows": _table(found, floors)},
            figures=_figures(headline, found, floors),
            notes=[
                "a chunk and a step take turns, each a pass of its own over one cache: servers that mix them into one "
                "pass read the weights once for both, which is not measured here",
                "gaps are those of the rows that decode; the longest is the median over the repeats of each one's "
                "longest; there is a 99th percentile for 100 gaps or more",
                f"the first arrival of all, which is not counted, had its first token after "
                f"{found[min(found)].first_ttft_ms:.0f} ms",
                "the size of the best balance has the least product of time to the first token and longest gap",
                "theory: the chunks' passes at the measured ceilings, in turn with steps at theirs; a gap is a mean "
                "chunk and a step, without overhead",
            ],
            limits=limits,
        )

    def _floor(self, lab: Lab, chunk: int) -> tuple[float, float]:
        """Milliseconds to the first token, and of a mean gap."""
        tokens, num_chunks = self.prompt_tokens, -(-self.prompt_tokens // chunk)
        prefill = replace(lab.event(1, tokens, 0), num_passes=num_chunks)
        reading_ms = 1e3 * theory.cost_of(prefill, lab.cost_at(tokens), lab.ceilings).seconds
        step_ms = lab.floors(self.rows, 1, self.context).hardware_ms
        return reading_ms + (num_chunks - 1) * step_ms, reading_ms / num_chunks + step_ms


def balanced(found: Mapping[int, Arrivals]) -> int:
    """The chunk size with the least product of both waits."""
    return min(found, key=lambda chunk: found[chunk].ttft_ms * found[chunk].longest_gap_ms)


def _headline(found: Mapping[int, Arrivals], prompt_tokens: int) -> str:
    best, most = balanced(found), max(found)
    read = "whole" if most == prompt_tokens else f"in chunks of {most}"
    if best == most:
        text = f"Read {read}, a prompt of {prompt_tokens} tokens makes others wait {found[most].longest_gap_ms:.0f} ms"
        if len(found) == 1:
            return text
        return f"{text}; smaller chunks lengthen the time to the first token by more than they shorten that"
    gap, ttft = (
        found[best].longest_gap_ms / found[most].longest_gap_ms,
        found[best].ttft_ms / found[most].ttft_ms,
    )
    return (
        f"In chunks of {best}, a prompt of {prompt_tokens} tokens makes others wait "
        f"{found[best].longest_gap_ms:.0f} ms at most ({gap:.2f} of what it does {read}), "
        f"for {ttft:.2f} times the time to its first token"
    )


def _table(found: Mapping[int, Arrivals], floors: Mapping[int, tuple[float, float]]) -> Rows:
    heading = [
        "tokens of a chunk",
        "chunks",
        "TTFT, ms [quartiles]",
        "of it reading",
        "longest gap, ms [quartiles]",
        "median gap, ms",
        "p99",
        "gap without arrival",
        "floor: TTFT, ms",
        "floor: gap, ms",
    ]
    return [
        heading,
        *(
            [
                str(chunk),
                str(at.num_chunks),
                with_quartiles([run.ttft_ms for run in at.runs]),
                f"{at.reading_ms:.0f}",
                with_quartiles([max(run.gaps_ms) for run in at.runs]),
                f"{at.median_gap_ms:.1f}",
                "-" if at.p99_gap_ms is None else f"{at.p99_gap_ms:.1f}",
                f"{at.idle_gap_ms:.1f}",
                f"{floors[chunk][0]:.0f}",
                f"{floors[chunk][1]:.1f}",
            ]
            for chunk, at in found.items()
        ),
    ]


def _figures(
    headline: str, found: Mapping[int, Arrivals], floors: Mapping[int, tuple[float, float]]
) -> dict[str, Figure | None]:
    floor = "hardware floor"
    ttft = Panel(
        [
            Line("time to the first token", [(chunk, at.ttft_ms) for chunk, at in found.items()]),
            Line("of it, reading", [(chunk, at.reading_ms) for chunk, at in found.items()]),
            Line(floor, [(chunk, times[0]) for chunk, times in floors.items()], is_theory=True),
        ],
        "tokens of a chunk",
        "the new request, ms",
    )
    gap = Panel(
        [
            Line("longest gap", [(chunk, at.longest_gap_ms) for chunk, at in found.items()]),
            Line("median gap", [(chunk, at.median_gap_ms) for chunk, at in found.items()]),
            Line("gap while nothing is read", [(chunk, at.idle_gap_ms) for chunk, at in found.items()]),
            Line(floor, [(chunk, times[1]) for chunk, times in floors.items()], is_theory=True),
        ],
        "tokens of a chunk",
        "between two tokens of the others, ms",
    )
    return {"chunked_prefill.png": curves([ttft, gap], headline)}
