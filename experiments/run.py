"""python -m experiments.run strategy=specdec : compose -> prepare -> measure -> compare -> log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import command_line, record, report, sweep_report, tracking
from experiments import point as points
from experiments.bundled_model import BundledModelError
from experiments.command_line import BadInputError, Sweep
from experiments.config import RunConfig

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the points of a command line; the exit status is 0 only if all of them were measured and logged."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return command_line.run_jobs(run_point, sweep_report.write, arguments)


def run_point(config: RunConfig, sweep: Sweep) -> None:
    """Measure one point and log it as one MLflow run.

    Raises BadInputError for whatever the user can mend: mostly before anything is loaded or logged; parts that
    turn out not to fit when they are loaded leave a FAILED run, as does everything that is raised later.
    """
    started_s = time.perf_counter()
    try:
        point = points.prepare(config)
    except (ValueError, BundledModelError) as error:
        raise BadInputError(str(error)) from error
    _print(report.plan_lines(point))
    OUT.print(f"loads, warms up, then measures {point.num_block_runs} blocks of prompts in turn")
    sweep.studies.add(config.study)
    store = tracking.open_store()
    name = f"{point.config.strategy} {point.config_hash[:6]}"
    tags = record.tags_before(point, sweep.sweep_id)
    try:
        with tracking.run(store, config.study, name, tags, vars(point.config)) as logged:
            record.record_setting(point, logged)
            with _progress(point.num_block_runs) as advance:
                result = points.measure_point(
                    point,
                    on_loaded=lambda sizes: _print(report.footprint_lines(sizes)),
                    on_progress=advance,
                    on_measured=lambda traces: record.record_traces(point, traces, logged),
                )
            # Printed before it is logged: a store that fails now must not take the result with it.
            OUT.print(report.console_table(result))
            _print(report.notes(result))
            record.record_result(result, logged)
    except points.UnfitPartsError as error:
        raise BadInputError(str(error)) from error
    OUT.print(f"{time.perf_counter() - started_s:.0f} s in all; logged as run {logged.run_id}")
    OUT.print("compare runs in a browser: python -m experiments.ui")


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        OUT.print(line)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No refresh thread: the bar moves between blocks, never while something is timed.
    with Progress(
        *columns, console=ERR, transient=True, auto_refresh=False, disable=not ERR.is_terminal
    ) as bar:
        task = bar.add_task("loading and warming up", total=total)
        bar.refresh()
        yield lambda arm: bar.update(task, advance=1, description=arm, refresh=True)


if __name__ == "__main__":
    sys.exit(main())
