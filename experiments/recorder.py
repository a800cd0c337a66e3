"""Where events are written down while something is timed: into arrays made before, turned into a `Trace` after.

Within a timed region an event costs two clock readings and one stored tuple; nothing is computed, copied or logged
(`python -m experiments.benchmarks.recorder_cost` measures it).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.trace import PassEvent, ProposalEvent, StepEvent, Trace
from specdec.types import StepOutput

Clock = Callable[[], float]
INITIAL_ROWS = 4096


class _Events:
    """Rows of (start, end, what): preallocated, doubled where that was too little."""

    def __init__(self, num_rows: int) -> None:
        self._starts_s = array("d", bytes(8 * num_rows))
        self._ends_s = array("d", bytes(8 * num_rows))
        self._what: list[Any] = [None] * num_rows
        self._count = 0

    def add(self, start_s: float, end_s: float, what: Any) -> None:
        index = self._count
        if index == len(self._what):
            self._double()
        self._starts_s[index] = start_s
        self._ends_s[index] = end_s
        self._what[index] = what
        self._count = index + 1

    def clear(self) -> None:
        self._what[: self._count] = [None] * self._count
        self._count = 0

    def __iter__(self) -> Iterator[tuple[float, float, Any]]:
        count = self._count
        return zip(self._starts_s[:count], self._ends_s[:count], self._what[:count], strict=True)

    def _double(self) -> None:
        self._starts_s.extend(self._starts_s)
        self._ends_s.extend(self._ends_s)
        self._what.extend([None] * len(self._what))


class Recorder:
    """The events of the block that is being decoded. `restore` takes timed wrappers away again."""

    def __init__(self, clock: Clock, num_rows: int = INITIAL_ROWS) -> None:
        self.clock = clock
        self._passes = _Events(num_rows)
        self._proposals = _Events(num_rows)
        self._steps = _Events(num_rows)
        self._replaced: list[tuple[object, str, object]] = []

    def clear(self) -> None:
        """Before a block: forget what was recorded."""
        for events in (self._passes, self._proposals, self._steps):
            events.clear()

    def add_pass(
        self,
        phase: str,
        start_s: float,
        end_s: float,
        counts: Sequence[int],
        width: int,
        slots: slice,
        lengths: tuple[int, ...],
        num_passes: int,
    ) -> None:
        """`lengths` are the cached tokens of every slot afterwards, `slots` those of the pass's rows."""
        self._passes.add(start_s, end_s, (phase, tuple(counts), width, slots, lengths, num_passes))

    def add_proposal(self, start_s: float, end_s: float) -> None:
        self._proposals.add(start_s, end_s, None)

    def add_step(self, start_s: float, end_s: float, output: StepOutput) -> None:
        self._steps.add(start_s, end_s, output)

    def trace(self, arm: str, repeat: int, block: int, start_s: float, end_s: float) -> Trace:
        """After a block: what was recorded since `clear`."""
        return Trace(
            arm,
            repeat,
            block,
            start_s,
            end_s,
            steps=[StepEvent(*event) for event in self._steps],
            passes=[_pass_event(*event) for event in self._passes],
            proposals=[ProposalEvent(start, end) for start, end, _ in self._proposals],
        )

    def replace(self, owner: object, name: str, timed: object) -> None:
        """Put a timed wrapper in the place of an attribute, until `restore`."""
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed)

    def restore(self) -> None:
        """Put back what was replaced."""
        while self._replaced:
            setattr(*self._replaced.pop())


def _pass_event(start_s: float, end_s: float, what: tuple) -> PassEvent:
    phase, counts, width, slots, lengths, num_passes = what
    others = lengths[: slots.start or 0] + lengths[slots.stop :]
    return PassEvent(phase, start_s, end_s, counts, width, lengths[slots], sum(lengths), num_passes, others)
