"""python -m experiments.compare baseline=baseline 'candidates=["prompt_lookup draft_length.max=6", specdec]'

Arms are a strategy preset plus overrides. They decode the same prompts in turn, beside the baseline a second time;
the answer is a verdict for each candidate, with an interval. Whatever else stands on the command line holds for all
arms: `workload.limit=6 measure.repeats=3 threads=1`.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments import command_line, compare_report, environment, figures, record, report, tracking
from experiments.bench import UnfitPartsError, Watcher
from experiments.bundled_model import BundledModelError
from experiments.ceilings_store import StoredCeilings
from experiments.command_line import BAD_INPUT_STATUS, FAILURE_STATUS
from experiments.comparison import (
    ArmError,
    ComparisonResult,
    measure_comparison,
    prepare_comparison,
)
from experiments.metrics import METRICS_VERSION
from experiments.terminal import OUT, print_lines, progress
from experiments.tracking import LoggedRun, Store

USAGE = """usage: python -m experiments.compare baseline=ARM 'candidates=[ARM, "ARM", ...]' [SETTING=VALUE ...]

An ARM is a strategy preset, with overrides where wanted and then in double quotes: "prompt_lookup draft_length.max=6",
as in 'baseline="baseline weights=bnb_nf4"'. The default baseline is `baseline`. A SETTING holds for all arms; they are
those of experiments.run: workload.limit=6 measure.repeats=3 threads=1. --help there lists their choices.

example: python -m experiments.compare baseline=baseline 'candidates=["prompt_lookup draft_length.max=6", specdec]'
"""

BAD_INPUT = (HydraException, OmegaConfBaseException, ValueError, BundledModelError)
# What has words in it has quotes of its own, for Hydra to read, within those that a shell takes.
EXAMPLES = {
    "baseline": "'baseline=\"prompt_lookup draft_length.max=4\"'",
    "candidates": "'candidates=[\"prompt_lookup draft_length.max=6\", specdec]'",
}


@dataclass(frozen=True)
class Question:
    """What a command line asks for."""

    baseline: str
    candidates: tuple[str, ...]
    shared_overrides: tuple[str, ...]

    @staticmethod
    def parse(arguments: Sequence[str]) -> Question:
        """Raises ValueError for a line that asks for nothing that can be compared."""
        given: dict[str, str] = {}
        shared = []
        for argument in arguments:
            name, equals, _ = argument.partition("=")
            if name in EXAMPLES and equals:
                if name in given:
                    raise ValueError(f"{name}=... is given twice: expected it once, as in {EXAMPLES[name]}")
                given[name] = argument
            elif argument.startswith("-"):
                raise ValueError(
                    f"unknown option {argument}: expected baseline=..., candidates=... and settings"
                )
            else:
                shared.append(argument)
        if "candidates" not in given:
            raise ValueError(f"no candidates: expected a list of arms, as in {EXAMPLES['candidates']}")
        baseline = _value(given.get("baseline", "baseline=baseline"))
        candidates = _value(given["candidates"])
        if not isinstance(baseline, str):
            raise _unreadable(given["baseline"])
        if isinstance(candidates, str):
            candidates = [candidates]
        if (
            not isinstance(candidates, list)
            or not candidates
            or not all(isinstance(c, str) for c in candidates)
        ):
            raise _unreadable(given["candidates"])
        return Question(baseline, tuple(candidates), tuple(shared))


def _value(argument: str) -> Any:
    try:
        (override,) = OverridesParser.create().parse_overrides([argument])
    except HydraException as error:
        raise _unreadable(argument) from error
    return None if override.is_sweep_override() else override.value()


def _unreadable(argument: str) -> ValueError:
    name, _, value = argument.partition("=")
    what = "an arm" if name == "baseline" else "a list of arms"
    return ValueError(f"{name}={value}: expected {what}, as in {EXAMPLES[name]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit status is 0 only if all arms were measured and logged."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    return command_line.guarded(lambda: _compare(arguments))


def _compare(arguments: Sequence[str]) -> int:
    started_s = time.perf_counter()
    try:
        question = Question.parse(arguments)
        comparison = prepare_comparison(question.baseline, question.candidates, question.shared_overrides)
    except BAD_INPUT as error:
        print(f"error: {_explain(error)}", file=sys.stderr)
        return BAD_INPUT_STATUS
    print_lines(compare_report.plan_lines(comparison))
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
    try:
        with tracking.run(store, config.study, f"compare {comparison_id}", tags, {}) as logged:
            logged.log_text(yaml.safe_dump(settings, sort_keys=False), "config/arms.yaml")
            torch.set_num_threads(config.threads or 1)  # the environment says how many
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
            OUT.print(report.console_table(compare_report.console_rows(result)))
            print_lines([*compare_report.verdict_lines(result), *compare_report.notes(result)])
            record.record_machine(machine, result.measured, ceilings.run_id, logged)
            _record(result, logged)
            for label in comparison.points:
                _record_arm(result, label, store, tags, machine, ceilings.run_id, logged.run_id)
            _draw(result, logged)
            if trouble or result.trouble is not None:
                raise result.trouble or trouble[0]
    except UnfitPartsError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    print_lines(
        [
            f"{time.perf_counter() - started_s:.0f} s in all; logged as run {logged.run_id}",
            "compare runs in a browser: python -m experiments.ui",
        ]
    )
    return FAILURE_STATUS if result.measured.failures else 0


def _explain(error: Exception) -> str:
    """One line for the user; raises what is no mistake of theirs."""
    if not isinstance(error, ArmError):
        return command_line.explain(error)
    if not isinstance(error.__cause__, BAD_INPUT):
        raise error
    return f"arm '{error.label}': {command_line.explain(error.__cause__)}"


def _record(result: ComparisonResult, logged: LoggedRun) -> None:
    """The report run: verdicts, table, picture."""
    text = compare_report.markdown(result)
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


if __name__ == "__main__":
    sys.exit(main())
