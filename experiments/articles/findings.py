"""What an experiment found: curves, numbers, tables, figures, and the sentence that sums it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Findings:
    """The result of an experiment.

    `headline` is the finding in a sentence. `curves` are step metrics by contract name: (step, value). `tables` are by
    title, heading first. `figures` are by file name, None for one that had nothing to show. `notes` are what a reader
    should know: where theory is off, what was shrunk. `limits` are what could not be measured, as in
    {"batch 128": "out of memory"}.
    """

    headline: str
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    tables: Mapping[str, Rows] = field(default_factory=dict)
    figures: Mapping[str, Figure | None] = field(default_factory=dict)
    notes: Sequence[str] = ()
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def drawn(self) -> dict[str, Figure]:
        """The figures that show something."""
        return {name: figure for name, figure in self.figures.items() if figure is not None}
