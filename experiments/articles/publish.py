"""Findings on the console and in an MLflow run: curves as step metrics, the page as description and artifact."""

from __future__ import annotations

import re

from experiments import record
from experiments.articles.findings import Findings
from experiments.articles.page import limit_lines
from experiments.console_table import ConsoleTable
from experiments.terminal import OUT, print_lines
from experiments.tracking import LoggedRun

PLOTS = "plots"
# What MLflow takes in the name of a tag.
_NO_NAME = re.compile(r"[^\w.\-: /]")


def show(found: Findings) -> None:
    """Print the finding, the tables, the notes, and what could not be measured."""
    OUT.print(found.headline, markup=False)
    for heading, rows in found.tables.items():
        OUT.print(heading, markup=False)
        OUT.print(ConsoleTable(rows))
    print_lines([*found.notes, *limit_lines(found)])


def log(found: Findings, text: str, logged: LoggedRun) -> None:
    """Log everything; `text` is the page, which finds its figures in the folder `PLOTS`."""
    for curve, points in found.curves.items():
        logged.log_curve(curve, points)
    logged.log_metrics(found.metrics)
    logged.log_text(text, "report.md")
    logged.set_description(text)
    logged.set_tags({limit_tag(what): why for what, why in found.limits.items()})
    record.record_figures(found.drawn, logged)


def limit_tag(what: str) -> str:
    """Without signs that MLflow refuses, after everything was measured."""
    return f"limit.{_NO_NAME.sub('', what)}"
