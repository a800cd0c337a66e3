"""An experiment's page in Markdown: finding, figure, measured beside theory, what limits it, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.articles.findings import Findings
from experiments.report import markdown_table, paragraphs


@dataclass(frozen=True)
class Heading:
    """What stands around findings: which experiment, on what, and the command that measures it again."""

    name: str
    title: str
    setting: str
    command: str


def page(heading: Heading, found: Findings, figure_folder: str, level: int = 1) -> str:
    """`figure_folder` is where the page finds the figures, relative to itself; `level` is its title's."""
    parts = [f"{'#' * level} {heading.title}", f"{found.headline}."]
    parts += [f"![{heading.title}]({figure_folder}/{file})" for file in found.drawn]
    for title, rows in found.tables.items():
        parts += [f"**{title}**", markdown_table([list(row) for row in rows])]
    lines = [*found.notes, *limit_lines(found)]
    if lines:
        parts.append(paragraphs(lines))
    parts.append(f"{heading.setting}. Again: `{heading.command}`")
    return "\n\n".join(parts) + "\n"


def limit_lines(found: Findings) -> Sequence[str]:
    """What could not be measured, and why."""
    return [f"{what}: {why}" for what, why in found.limits.items()]
