"""A comparison, measured, printed and logged: a report run, and a run for each arm."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import yaml

from experiments import compare_report, environment, figures, overview, record, report, tracking
from experiments.bench import Watcher
from experiments.ceilings_store import StoredCeilings
from experiments.comparison import ComparisonResult, PreparedComparison, measure_comparison
from experiments.console_table import ConsoleTable
from experiments.load import LoadMeter
from experiments.metrics import METRICS_VERSION
from experiments.report import Rows
from experiments.terminal import OUT, print_lines, progress
from experiments.tracking import LoggedRun, Store

# Near ties that are printed, per arm; the report has them all.
MOST_TIES = 3


def run_comparison(
    comparison: PreparedComparison,
    title: str,
    started_s: float,
    console_rows: Callable[[ComparisonResult], Rows] = compare_report.console_rows,
) -> ComparisonResult:
    """Measure all arms; `title` is the kind of comparison, `console_rows` the table that is printed.

    Raises UnfitPartsError where the baseline's parts don't fit, and whatever kept the result from being logged.
    """
    # For whatever is timed, the choice of kernels included.
    torch.set_num_threads(comparison.shared.config.threads or 1)
    load = LoadMeter()
    comparison = comparison.with_kernels()
    planning_load = load.read()
    print_lines(
        [*compare_report.plan_lines(comparison), *compare_report.weights_lines(comparison, planning_load)]
    )
    store = tracking.open_store()
    comparison_id = uuid.uuid4().hex[:8]
    config = comparison.shared.config
    tags = {
        "kind": "report",
        "sweep_id": comparison_id,
        "metrics_version": METRICS_VERSION,
        **record.git_tags(),
    }
    ceilings = StoredCeilings(store, config.study, config.measure.ceilings == "refresh")
    trouble: list[Exception] = []
    settings = {label: asdict(point.config) for label, point in comparison.points.items()}
    with tracking.run(store, config.study, f"{title} {comparison_id}", tags, {}) as logged:
        logged.log_text(yaml.safe_dump(settings, sort_keys=False), "config/arms.yaml")
        machine = environment.collect()
        record.record_environment(machine, logged)
        with progress(comparison.num_block_runs) as advance:
            watcher = Watcher(
                on_loaded=lambda sizes: print_lines(
                    report.footprint_lines({arm: sizes[arm] for arm in comparison.points if arm in sizes})
                ),
                on_progress=advance,
                on_measured=record.tracer(comparison.shared, logged, trouble),
            )
            result = measure_comparison(comparison, watcher, ceilings)
        # Printed before it is logged: a store that fails now must not take the result with it.
        OUT.print(ConsoleTable(console_rows(result)))
        print_lines([*compare_report.verdict_lines(result), *compare_report.notes(result, MOST_TIES)])
        record.record_machine(machine, result.measured, ceilings.run_id, logged)
        _record(result, logged)
        for label in comparison.points:
            _record_arm(result, label, store, tags, machine, ceilings.run_id, logged.run_id)
        _draw(result, logged)
        if trouble or result.trouble is not None:
            raise result.trouble or trouble[0]
    print_lines(
        [
            f"{time.perf_counter() - started_s:.0f} s in all; logged as run {logged.run_id}",
            "compare runs in a browser: python -m experiments.ui",
        ]
    )
    return result


def _record(result: ComparisonResult, logged: LoggedRun) -> None:
    """The report run: verdicts, tables, picture."""
    text = compare_report.markdown(result, overview.rows(result))
    logged.set_description(text)
    logged.log_metrics(compare_report.metrics(result))
    failed = {"validity": "failed"} if result.measured.failures else {}
    logged.set_tags({**record.validity_tags(result.measured), **failed})
    labels = list(result.comparison.points)
    logged.log_text(f"{text}\n{record.details(result.measured, labels)}", "report.md")


def _draw(result: ComparisonResult, logged: LoggedRun) -> None:
    """Last: a failure here costs pictures only."""
    labels = list(result.comparison.points)
    title = compare_report.title(result.comparison)
    record.record_figures(compare_report.interval_figure(result), logged)
    record.record_figures(figures.of_arms(result.measured, labels, title), logged)


def _record_arm(
    result: ComparisonResult,
    label: str,
    store: Store,
    tags: Mapping[str, str],
    machine: Mapping[str, Any],
    ceilings_run_id: str | None,
    report_run_id: str,
) -> None:
    """One arm as a run of its own, so that runs can be compared in the UI; a failed one says why."""
    point = result.comparison.points[label]
    own_tags = record.tags_before(point, tags["sweep_id"])
    failure = result.measured.failures.get(label)
    try:
        with tracking.run(store, point.config.study, label, own_tags, vars(point.config)) as logged:
            record.record_setting(point, machine, logged)
            logged.set_description(compare_report.arm_description(result, label, report_run_id))
            if failure is not None:
                raise failure
            _record_numbers(result, label, ceilings_run_id, logged)
    except Exception as error:
        if error is not failure:  # that one is known and reported
            raise


def _record_numbers(
    result: ComparisonResult, label: str, ceilings_run_id: str | None, logged: LoggedRun
) -> None:
    logged.log_metrics(compare_report.arm_metrics(result, label))
    logged.log_curve("trace/step_ms", record.step_curve(result.measured.timelines_of(label).values()))
    verdict = {"verdict": result.verdict(label)} if label in result.speedups else {}
    ceilings = {} if ceilings_run_id is None else {"ceilings": ceilings_run_id}
    logged.set_tags(
        {
            "equivalence": result.equivalence(label),
            "lossless": str(result.lossless(label)).lower(),
            **record.validity_tags(result.measured),
            **verdict,
            **ceilings,
        }
    )
