"""What commands print to a terminal: lines, tables, and a bar that moves between blocks only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# A file or a pipe has no width: wide enough for a table that isn't cut.
FILE_WIDTH = 160
OUT = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)
ERR = Console(stderr=True, highlight=False)


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        OUT.print(line, markup=False)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; the function that is given moves it by one and names what was done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No refresh thread: the bar moves between blocks, never while something is timed.
    with Progress(
        *columns, console=ERR, transient=True, auto_refresh=False, disable=not ERR.is_terminal
    ) as bar:
        task = bar.add_task("loading and warming up", total=total)
        bar.refresh()
        yield lambda arm: bar.update(task, advance=1, description=arm, refresh=True)
