"""python -m experiments.run strategy=specdec : compose -> prepare -> measure -> compare -> log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from experiments import command_line, environment, record, report, sweep_report, tracking
from experiments.bench import UnfitPartsError, Watcher
from experiments.bundled_model import BundledModelError
from experiments.ceilings_store import StoredCeilings
from experiments.command_line import BAD_INPUT, FAILURE_STATUS, BadInputError, Sweep, explain_arm
from experiments.config import RunConfig, given_overrides
from experiments.console_table import ConsoleTable
from experiments.load import LoadMeter
from experiments.measured_point import measure_point
from experiments.point import prepare
from experiments.terminal import OUT, print_lines, progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the points of a command line; the exit status is 0 only if all of them were measured and logged."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return command_line.run_jobs(run_point, sweep_report.write, arguments)


def run_point(config: RunConfig, sweep: Sweep) -> None:
    """Measure one point and log it as one MLflow run.

    Raises BadInputError for whatever the user can mend: mostly before anything is loaded or logged; parts that
    turn out not to fit when they are loaded leave a FAILED run, as does everything that is raised later.
    """
    if config.experiment is not None:
        run_study(config, sweep)
        return
    started_s = time.perf_counter()
    try:
        point = prepare(config)
        torch.set_num_threads(point.config.threads or 1)  # for what is timed, the choice of kernels included
        load = LoadMeter()
        point = point.with_kernels()
        plans = point.weight_plans(point.arms.strategy)
        planning_load = load.read()
    except (ValueError, BundledModelError) as error:
        raise BadInputError(str(error)) from error
    print_lines(report.plan_lines(point))
    for part in report.weights_lines(plans, planning_load):
        OUT.print(part, markup=False)
    OUT.print(f"loads, warms up, then measures {point.num_block_runs} blocks of prompts in turn")
    sweep.studies.add(config.study)
    store = tracking.open_store()
    name = f"{point.config.strategy} {point.config_hash[:6]}"
    tags = record.tags_before(point, sweep.sweep_id)
    trouble: list[Exception] = []
    ceilings = StoredCeilings(store, config.study, point.config.measure.ceilings == "refresh")
    try:
        with tracking.run(store, config.study, name, tags, vars(point.config)) as logged:
            before = environment.collect()
            record.record_setting(point, before, logged)
            with progress(point.num_block_runs) as advance:
                watcher = Watcher(
                    on_loaded=lambda sizes: print_lines(report.footprint_lines(sizes)),
                    on_progress=advance,
                    on_measured=record.tracer(point, logged, trouble),
                )
                result = measure_point(point, watcher, ceilings)
            # Printed before it is logged: a store that fails now must not take the result with it.
            OUT.print(ConsoleTable(report.point_rows(result)))
            print_lines(report.notes(result))
            record.record_machine(before, result.measured, ceilings.run_id, logged)
            record.record_result(result, logged)
            if trouble or result.trouble is not None:
                raise result.trouble or trouble[0]
    except UnfitPartsError as error:
        raise BadInputError(str(error)) from error
    OUT.print(f"{time.perf_counter() - started_s:.0f} s in all; logged as run {logged.run_id}")
    OUT.print("compare runs in a browser: python -m experiments.ui")


def run_study(config: RunConfig, sweep: Sweep) -> None:
    """A named experiment, which logs its own runs. Raises BadInputError for whatever the user can mend."""
    try:
        measure_study = config.experiment.prepare(given_overrides())
    except BAD_INPUT as error:
        raise BadInputError(explain_arm(error)) from error
    try:
        is_whole = measure_study()
    except UnfitPartsError as error:
        raise BadInputError(str(error)) from error
    if not is_whole:
        sweep.failures.append(f"experiment {config.experiment.name}: some of it failed, as said above")
        sweep.status = FAILURE_STATUS


if __name__ == "__main__":
    sys.exit(main())
