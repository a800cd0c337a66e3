"""Rows as tables for a terminal of any width: figures stay whole, headings break, and columns go on below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.table import Table

# A cell of more characters than this is a sentence, not a figure; columns of words are not made narrower.
LONGEST_FIGURE = 24
LEAST_WORDS = 16
# Headings are not broken to fewer characters than this.
LEAST_HEADING = 8
# What a column takes beside its text.
FRAME = 3


@dataclass(frozen=True)
class ConsoleTable:
    """Rows, heading first. Where not all columns fit beside the first, the rest stands in tables below, with it."""

    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = [_Column(index == 0, cells) for index, cells in enumerate(zip(*self.rows, strict=True))]
        for part in _parts(columns, options.max_width):
            table = Table()
            for column in part:
                column.add_to(table)
            for cells in zip(*(column.cells[1:] for column in part), strict=True):
                table.add_row(*map(escape, cells))
            yield table


@dataclass(frozen=True)
class _Column:
    is_first: bool
    cells: Sequence[str]

    @property
    def widest(self) -> int:
        return max(map(len, self.cells[1:]), default=0)

    @property
    def is_words(self) -> bool:
        """The first column, and those of sentences: they may be broken."""
        return self.is_first or self.widest > LONGEST_FIGURE

    @property
    def heading(self) -> str:
        if self.is_words:
            return self.cells[0]
        width = max(self.widest, LEAST_HEADING)
        lines = textwrap.wrap(self.cells[0], width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    @property
    def least_width(self) -> int:
        if self.is_words:
            return min(LEAST_WORDS, max(map(len, self.cells)))
        return max(self.widest, *map(len, self.heading.splitlines() or [""]))

    def add_to(self, table: Table) -> None:
        table.add_column(
            escape(self.heading),
            justify="left" if self.is_words else "right",
            no_wrap=not self.is_words,
            overflow="fold",
        )


def _parts(columns: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """As many columns as fit, each time behind the first; at least one, whatever the width."""
    first, *rest = columns
    part = [first]
    for column in rest:
        if len(part) > 1 and sum(one.least_width + FRAME for one in [*part, column]) + 1 > width:
            yield part
            part = [first]
        part.append(column)
    yield part
