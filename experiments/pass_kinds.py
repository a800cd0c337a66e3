"""The passes of an arm by kind (prefill, decode, verify of n tokens, draft): what each cost, and of which ceiling."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.bench import Measured
from experiments.roofline import ModelCost, RooflinePoint, mbu_frac, mfu_frac, point
from experiments.trace import PassEvent, Trace


def by_kind(traces: Sequence[Trace]) -> dict[str, list[PassEvent]]:
    """Verify passes are told apart by their width: they are what a draft length chooses between."""
    found: dict[str, list[PassEvent]] = {}
    for trace in traces:
        for event in trace.passes:
            label = event.phase.replace("_", " ")
            if event.phase == "verify":
                label += f" of {event.width}"
            found.setdefault(label, []).append(event)
    return dict(sorted(found.items()))


def roofline_points(measured: Measured, arm: str) -> list[RooflinePoint]:
    """One per kind of pass that took any time."""
    found = [
        point(label, events, _cost(measured, arm, label))
        for label, events in by_kind(measured.traces_of(arm)).items()
    ]
    return [made for made in found if made is not None]


def rows(measured: Measured, arm: str) -> list[list[str]]:
    """A table, heading first: number and mean time of each kind of pass, and its shares of the ceilings if known."""
    heading = ["pass", "number", "mean ms", "tokens"]
    if measured.ceilings is not None:
        heading += ["MBU", "MFU"]
    return [
        heading,
        *(_row(measured, arm, label, events) for label, events in by_kind(measured.traces_of(arm)).items()),
    ]


def _row(measured: Measured, arm: str, label: str, events: Sequence[PassEvent]) -> list[str]:
    number = sum(event.num_passes for event in events)
    mean_ms = 1e3 * sum(event.duration_s for event in events) / number
    tokens = sum(sum(event.counts) for event in events) / number
    row = [label, str(number), f"{mean_ms:.2f}", f"{tokens:.1f}"]
    if measured.ceilings is not None:
        cost = _cost(measured, arm, label)
        shares = [share(events, cost, measured.ceilings) for share in (mbu_frac, mfu_frac)]
        row += ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
    return row


def _cost(measured: Measured, arm: str, label: str) -> ModelCost:
    footprint = measured.footprints[arm]
    return footprint.draft if label.startswith("draft") and footprint.draft else footprint.target
