"""Reading a text against writing one as long: one pass over all of it, or one pass for each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.findings import Findings, Rows
from experiments.articles.floor_lines import FLOOR_HEADING, floor_cells, step_agreement
from experiments.articles.lab import BEYOND_CONTEXT, Floors, Lab, along
from experiments.articles.steps import Step, decode_steps
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.kernel_times import rows_of
from experiments.plots.curves import Line, Panel, curves
from specdec.types import Phase

LEAST_READ = 16
READ_BUDGET_S = 0.8
FLOOR_WRITING = "writing at the hardware floor: the weights once a step"


@dataclass
class ReadVsWriteOptions(ArticleOptions):
    """`prompt_tokens`: how long a text is read; `new_tokens`: how long a text is written behind it."""

    title: ClassVar[str] = "Reading a text against writing one"
    decodes: ClassVar[bool] = True

    prompt_tokens: int = 512
    new_tokens: int = 512

    def __post_init__(self) -> None:
        self.check_at_least(prompt_tokens=1, new_tokens=2)

    def measure(self, lab: Lab) -> Findings:
        chunk = lab.point.config.prefill_chunk
        lengths = doublings(self.prompt_tokens)
        reads, limits = along(lengths, "read", lambda n: lab.prefill(n, chunk, budget_s=READ_BUDGET_S))
        most = max(reads)
        # The prefill brings the first token, steps bring those that count as written. Where both texts don't fit into
        # the context, there is less before what is written.
        behind = max(1, min(most, lab.context - self.new_tokens - 1))
        new_tokens = min(self.new_tokens, lab.context - behind - 1)
        if new_tokens < self.new_tokens:
            limits[f"write {self.new_tokens}"] = BEYOND_CONTEXT
        decoded = decode_steps(lab, 1, behind, new_tokens + 1)
        found = Comparison(most, reads[most], written(decoded.steps))
        floors = {tokens: lab.floors(1, tokens, 0, kernels=tokens == most) for tokens in reads}
        middle = behind + found.num_written // 2
        kernels = lab.kernel_times(1, 1, middle)
        step_floor = replace(lab.floors(1, 1, middle), kernels_ms=kernels.total_ms)
        return Findings(
            found.headline,
            curves={
                "curve_prefill/ms": [(tokens, timing.median_ms) for tokens, timing in reads.items()],
                "curve_prefill/tok_s": [(tokens, timing.per(tokens)) for tokens, timing in reads.items()],
                "trace/step_ms": found.positions_ms,
            },
            metrics={
                "read_vs_write/read_ms": found.read.median_ms,
                "read_vs_write/write_ms": found.write_ms,
                "read_vs_write/time_ratio": found.ratio,
                "read_vs_write/rate_ratio": found.rate_ratio,
            },
            tables={
                "Tokens read together, and one after the other": _table(found, floors[most], step_floor),
                f"One plain step behind {middle} tokens, its kernels timed alone": rows_of(kernels),
            },
            figures=_figures(found, reads, floors, step_floor),
            notes=[
                f"theory: the weights are read {-(-most // (chunk or most))} time(s) for reading, {found.num_steps} "
                "times for writing; that would be the ratio if both were limited by memory, but a pass over many "
                "tokens computes more, which makes it smaller",
                "the articles: 27 ms against 5.2 s, about 190 times; rates 19 and 147 times apart elsewhere",
                "reading was repeated, over random tokens and by the target alone; writing is every step once, as the "
                f"strategy decodes, behind {behind} tokens of real text",
                f"the first time, reading took {found.read.first_ms:.0f} ms, which is not counted, and a step "
                f"{decoded.timing.first_ms:.1f} ms, which is",
                f"a step at the middle: {step_agreement(lab, {1: decoded.timing}, {1: step_floor})}",
            ],
            limits=limits,
        )


@dataclass(frozen=True)
class Comparison:
    """How long it took to read a text, and the steps that wrote one behind it: milliseconds and tokens of each."""

    read_tokens: int
    read: Timing
    steps: Sequence[tuple[float, int]]

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_written(self) -> int:
        return sum(tokens for _, tokens in self.steps)

    @property
    def write_ms(self) -> float:
        return sum(ms for ms, _ in self.steps)

    @property
    def ratio(self) -> float:
        return self.write_ms / self.read.median_ms

    @property
    def rate_ratio(self) -> float:
        """Tokens a second read over those written: the ratio for texts of one length."""
        return self.read.per(self.read_tokens) / (1e3 * self.num_written / self.write_ms)

    @property
    def positions_ms(self) -> list[tuple[int, float]]:
        """Each step by the output position of its last token; position 1 is the prefill's."""
        ends = accumulate(tokens for _, tokens in self.steps)
        return [(1 + end, ms) for end, (ms, _) in zip(ends, self.steps, strict=True)]

    @property
    def headline(self) -> str:
        return (
            f"Reading {self.read_tokens} tokens takes {self.read.median_ms:.3g} ms, "
            f"writing {self.num_written} takes {self.write_ms / 1e3:.2f} s: {self.ratio:.3g} times as long"
        )


def written(steps: Sequence[Step]) -> list[tuple[float, int]]:
    """Milliseconds and tokens of each step behind the prefill."""
    return [(step.ms, step.num_tokens) for step in steps if step.phase != Phase.PREFILL]


def doublings(most: int) -> list[int]:
    """`most`, its half, its quarter and so on while they are not short, in ascending order."""
    lengths = [most]
    while lengths[-1] // 2 >= LEAST_READ:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def _table(found: Comparison, read_floor: Floors, step_floor: Floors) -> Rows:
    floor_ms = found.num_steps * step_floor.hardware_ms
    kernels_ms = None if step_floor.kernels_ms is None else found.num_steps * step_floor.kernels_ms
    read_s, write_s = read_floor.hardware_ms / 1e3, floor_ms / 1e3
    written_floor = ["-" if value is None else f"{value:.0f}" for value in (floor_ms, kernels_ms)]
    rates = found.read.per(found.read_tokens), 1e3 * found.num_written / found.write_ms
    floor_rates = found.read_tokens / read_s, found.num_written / write_s
    return [
        ["", "measured", *FLOOR_HEADING, "articles (512 tokens)"],
        [f"{found.read_tokens} tokens read, ms", str(found.read), *floor_cells(read_floor), "27"],
        [f"{found.num_written} tokens written, ms", f"{found.write_ms:.0f}", *written_floor, "5200"],
        ["writing / reading", f"{found.ratio:.3g}", f"{write_s / read_s:.3g}", "-", "about 190"],
        ["read, tok/s", f"{rates[0]:.0f}", f"{floor_rates[0]:.0f}", "-", "-"],
        ["written, tok/s", f"{rates[1]:.1f}", f"{floor_rates[1]:.1f}", "-", "-"],
        [
            "rates, read / written",
            f"{found.rate_ratio:.3g}",
            f"{floor_rates[0] / floor_rates[1]:.3g}",
            "-",
            "19, 147 elsewhere",
        ],
    ]


def _figures(
    found: Comparison, reads: Mapping[int, Timing], floors: Mapping[int, Floors], step_floor: Floors
) -> dict[str, Figure | None]:
    floor_ms, last = step_floor.hardware_ms, found.positions_ms[-1][0]
    counts = list(accumulate(tokens for _, tokens in found.steps))
    elapsed_ms = list(accumulate(ms for ms, _ in found.steps))
    # The step with which so many tokens were there.
    ends = [
        next(step for step, count in enumerate(counts) if count >= length)
        for length in doublings(found.num_written)
    ]
    time = Panel(
        [
            Line("writing", [(counts[end], elapsed_ms[end]) for end in ends]),
            Line("reading", [(tokens, timing.median_ms) for tokens, timing in reads.items()]),
            Line(FLOOR_WRITING, [(counts[end], (end + 1) * floor_ms) for end in ends], is_theory=True),
            Line(
                "reading at the hardware floor",
                [(tokens, floor.hardware_ms) for tokens, floor in floors.items()],
                is_theory=True,
            ),
        ],
        "tokens, read or written",
        "time for all of them, ms",
    )
    step = Panel(
        [
            Line("writing", found.positions_ms),
            Line(FLOOR_WRITING, [(1, floor_ms), (last, floor_ms)], is_theory=True),
        ],
        "output position",
        "time of one step, ms",
        log_x=False,
        log_y=False,
    )
    return {"read_vs_write.png": curves([time, step], found.headline)}
