"""One request to scale: what each arm did from admission to the last token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from experiments.plots import style
from experiments.trace import PassEvent, ProposalEvent, StepEvent, Trace

# Cool colours are the target model's, warm ones the draft's.
COLOURS = {
    "prefill": style.BLUE,
    "decode": style.GREEN,
    "draft prefill": style.YELLOW,
    "draft": style.ORANGE,
    "verify": style.PURPLE,
    "other": style.GREY,
}
# A step as a whole, then what is known of its inside.
LAYERS = ("prefill", "decode", "other", "draft", "draft prefill", "verify")
BLOCK_HEIGHT = 0.5  # of a lane's
LANE_IN, FRAME_IN = 0.72, 1.6
TEXT_GAP_PX = 10
LAST_TICK_FRAC = 0.96
# Narrower steps are drawn in one shade: alternating ones would show the pixel grid, not the steps.
MIN_STEP_PX = 3
SEAM_PX = 0.05

Event = TypeVar("Event", PassEvent, ProposalEvent)


@dataclass(frozen=True)
class Segment:
    """Part of a step, in milliseconds since the request's admission. Later segments cover earlier ones."""

    kind: str
    start_ms: float
    end_ms: float
    step: int


@dataclass(frozen=True)
class Lane:
    """One arm's steps for one request; times in milliseconds since admission."""

    arm: str
    spans_ms: tuple[tuple[float, float], ...]
    sizes: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def first_token_ms(self) -> float:
        return self.spans_ms[0][1]

    @property
    def total_ms(self) -> float:
        return self.spans_ms[-1][1]

    @property
    def summary(self) -> str:
        tokens = sum(self.sizes)
        total = f"{tokens} {'token' if tokens == 1 else 'tokens'} in {_ms(self.total_ms)}"
        return f"{total}\nfirst after {_ms(self.first_token_ms)}"


def request_timeline(traces: Sequence[Trace], request_id: int, title: str) -> Figure | None:
    """A lane per trace in which the request took part, in the given order; None where there is none.

    The traces are those of one repeat and block, one per arm. Only steps of this request are drawn.
    """
    lanes = [lane for trace in traces if (lane := _lane(trace, request_id)) is not None]
    if not lanes:
        return None
    figure, axes = style.new_axes(title, height_in=FRAME_IN + LANE_IN * len(lanes))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [style.wrap(lane.arm, 32) for lane in lanes])
    style.label_axes(axes, "time since the request was admitted, ms")
    _legend(figure, lanes)
    style.fix_layout(figure)
    px_per_ms = _scale(figure, axes, lanes)
    for row, lane in enumerate(lanes):
        _draw(axes, row, lane, px_per_ms)
        _count_tokens(figure, axes, row, lane, px_per_ms)
    return figure


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def _lane(trace: Trace, request_id: int) -> Lane | None:
    steps = [step for step in trace.steps if request_id in step.output.request_ids]
    if not steps:
        return None
    admitted_s = steps[0].start_s
    segments = [
        Segment(kind, 1e3 * (start_s - admitted_s), 1e3 * (end_s - admitted_s), index)
        for index, step in enumerate(steps)
        for kind, start_s, end_s in _parts(trace, step)
    ]
    return Lane(
        arm=trace.arm,
        spans_ms=tuple(
            (1e3 * (step.start_s - admitted_s), 1e3 * (step.end_s - admitted_s)) for step in steps
        ),
        sizes=tuple(len(step.output.committed[step.output.request_ids.index(request_id)]) for step in steps),
        segments=tuple(segments),
    )


def _parts(trace: Trace, step: StepEvent) -> Iterator[tuple[str, float, float]]:
    """The whole step first, then what is known of its inside."""
    phase = str(step.output.phase)
    yield "other" if phase == "verify" else phase, step.start_s, step.end_s
    if phase == "verify":
        for proposal in _within(step, trace.proposals):
            yield "draft", proposal.start_s, proposal.end_s
    for event in _within(step, trace.passes):
        if event.phase == "draft_prefill":
            yield "draft prefill", event.start_s, event.end_s
        elif event.phase == "verify":
            yield "verify", event.start_s, event.end_s


def _within(step: StepEvent, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if step.start_s <= event.start_s < step.end_s]


def _scale(figure: Figure, axes: Axes, lanes: Sequence[Lane]) -> float:
    """Make the x axis as long as the widest lane with the text behind it needs; pixels per millisecond."""
    axes_px = axes.get_window_extent().width
    widths_px = [style.text_box(figure, lane.summary).width + 2 * TEXT_GAP_PX for lane in lanes]
    limits_ms = [
        lane.total_ms * axes_px / (axes_px - width_px)
        for lane, width_px in zip(lanes, widths_px, strict=True)
    ]
    limit_ms = max(limits_ms) or 1.0  # a toy's clock may stand still
    axes.set_xlim(0, limit_ms)
    # A label at the very end would leave the figure.
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= LAST_TICK_FRAC * limit_ms])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))
    return axes_px / limit_ms


def _draw(axes: Axes, row: int, lane: Lane, px_per_ms: float) -> None:
    """The lane's blocks, a line where the request waited for steps of others, its first token, and its totals."""
    waits = [(before[1], after[0]) for before, after in pairwise(lane.spans_ms)]
    axes.hlines(
        [row] * len(waits),
        [start_ms for start_ms, _ in waits],
        [end_ms for _, end_ms in waits],
        color=style.GREY,
        capstyle="butt",
    )
    for kind in LAYERS:
        _draw_blocks(axes, row, lane, kind, px_per_ms)
    below = row + BLOCK_HEIGHT / 2 + 0.09
    axes.plot([lane.first_token_ms], [below], "^", color=style.DARK, markersize=7, clip_on=False)
    axes.annotate(
        lane.summary,
        (lane.total_ms, row),
        (TEXT_GAP_PX, 0),
        textcoords="offset pixels",
        va="center",
        fontsize=style.FONT_PT,
        color=style.DARK,
    )


def _draw_blocks(axes: Axes, row: int, lane: Lane, kind: str, px_per_ms: float) -> None:
    """Every other step is lighter, so that steps can be told apart."""
    are_steps_visible = px_per_ms * lane.total_ms / len(lane.spans_ms) >= MIN_STEP_PX
    for is_light in (False, True):
        spans = [
            (segment.start_ms, segment.end_ms - segment.start_ms)
            for segment in lane.segments
            if segment.kind == kind and (are_steps_visible and _is_light(segment.step)) == is_light
        ]
        if spans:
            axes.broken_barh(
                _joined(spans, SEAM_PX / px_per_ms),
                (row - BLOCK_HEIGHT / 2, BLOCK_HEIGHT),
                facecolors=style.lighter(COLOURS[kind]) if is_light else COLOURS[kind],
                linewidth=0,
                snap=False,  # blocks narrower than a pixel blend instead of vanishing
                zorder=2 + 0.01 * LAYERS.index(kind),
            )


def _joined(spans: Sequence[tuple[float, float]], seam_ms: float) -> list[tuple[float, float]]:
    """(start, width) of neighbours as one: the seams between blocks of one shade would show."""
    joined = [spans[0]]
    for start_ms, width_ms in spans[1:]:
        before_ms, before_width_ms = joined[-1]
        if start_ms - (before_ms + before_width_ms) <= seam_ms:
            joined[-1] = (before_ms, start_ms + width_ms - before_ms)
        else:
            joined.append((start_ms, width_ms))
    return joined


def _is_light(step: int) -> bool:
    return step > 0 and step % 2 == 0


def _legend(figure: Figure, lanes: Sequence[Lane]) -> None:
    found = {segment.kind for lane in lanes for segment in lane.segments}
    kinds = [kind for kind in COLOURS if kind in found]
    handles: list[Artist] = [Patch(facecolor=COLOURS[kind]) for kind in kinds]
    handles.append(Line2D([], [], color=style.DARK, marker="^", linestyle="none", markersize=7))
    labels = [*kinds, "first token"]
    if any(size > 1 for lane in lanes for size in lane.sizes):
        handles.append(Line2D([], [], color=style.DARK, marker="$n$", linestyle="none", markersize=7))
        labels.append("tokens of a step, if several")
    style.legend_below(figure, handles, labels)


def _count_tokens(figure: Figure, axes: Axes, row: int, lane: Lane, px_per_ms: float) -> None:
    """The number of tokens above each block that wrote several and is wide enough."""
    widths_px = {size: style.text_box(figure, f"{size} ").width for size in set(lane.sizes)}
    for (start_ms, end_ms), size in zip(lane.spans_ms, lane.sizes, strict=True):
        if size > 1 and (end_ms - start_ms) * px_per_ms >= widths_px[size]:
            axes.text(
                0.5 * (start_ms + end_ms),
                row - BLOCK_HEIGHT / 2 - 0.03,
                str(size),
                ha="center",
                va="bottom",
                fontsize=style.FONT_PT,
                color=style.DARK,
            )
