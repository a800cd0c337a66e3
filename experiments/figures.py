"""The figures of a bench: which data of its arms goes into which plot."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.bench import Measured
from experiments.metrics import acceptance_by_position, request_metrics
from experiments.pass_kinds import roofline_points
from experiments.plots.acceptance import acceptance
from experiments.plots.roofline import roofline
from experiments.plots.step_gaps import step_gaps
from experiments.plots.timeline import request_timeline
from experiments.trace import RequestTimeline, Trace, timelines


def of_arms(measured: Measured, arms: Sequence[str], title: str) -> dict[str, Figure]:
    """By file name: the request timeline, the step gaps, the roofline, and each drafting arm's acceptance."""
    arms = [arm for arm in arms if measured.traces_of(arm)]
    found = {
        "timeline.png": _timeline(measured, arms, title),
        "step_gaps.png": step_gaps(
            {arm: _gaps(measured.traces_of(arm)) for arm in arms}, f"Time between commits: {title}"
        ),
        "roofline.png": _roofline(measured, arms, title),
        **_acceptance(measured, arms),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _timeline(measured: Measured, arms: Sequence[str], title: str) -> Figure | None:
    """One request, to scale, as each arm decoded it: the request of median length of the first arm."""
    if not arms:
        return None
    candidates = [
        (timeline.num_tokens, timeline.request_id, trace.block, trace.repeat)
        for trace in measured.traces_of(arms[0])
        for timeline in timelines(trace)
    ]
    _, request_id, block, repeat = sorted(candidates)[len(candidates) // 2]
    traces = [
        trace
        for arm in arms
        for trace in measured.traces_of(arm)
        if (trace.block, trace.repeat) == (block, repeat)
    ]
    return request_timeline(traces, request_id, f"One request, to scale: {title}")


def gaps_by_position(timeline: RequestTimeline) -> list[tuple[int, float]]:
    """(output position of a step's first token, the step's gap in ms); the first token has position 0."""
    position, found = timeline.commit_sizes[0], []
    gaps_ms = request_metrics(timeline).step_gaps_ms
    for gap_ms, size in zip(gaps_ms, timeline.commit_sizes[1:], strict=True):
        found.append((position, gap_ms))
        position += size
    return found


def _gaps(traces: Sequence[Trace]) -> list[tuple[int, float]]:
    return [
        place for trace in traces for timeline in timelines(trace) for place in gaps_by_position(timeline)
    ]


def _roofline(measured: Measured, arms: Sequence[str], title: str) -> Figure | None:
    if measured.ceilings is None:
        return None
    return roofline(
        {arm: roofline_points(measured, arm) for arm in arms}, measured.ceilings, f"Roofline: {title}"
    )


def _acceptance(measured: Measured, arms: Sequence[str]) -> dict[str, Figure | None]:
    found: dict[str, Figure | None] = {}
    for arm in arms:
        positions = [p for p in acceptance_by_position(measured.traces_of(arm)) if p.drafted]
        if positions:
            figure = acceptance(
                [p.accepted / p.drafted for p in positions],
                [p.accepted / p.reached if p.reached else 0.0 for p in positions],
                [p.drafted for p in positions],
                f"{arm}: draft tokens accepted, by position",
            )
            found["acceptance.png" if not found else f"acceptance_{len(found) + 1}.png"] = figure
    return found
