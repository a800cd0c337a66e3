"""A measured point as an MLflow run: tags, parameters, metrics and artifacts under their contract names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from experiments import environment, figures, other_tools, pass_kinds, plugins, weights_report
from experiments.bench import Measured
from experiments.clocks import energy_j, read_clocks
from experiments.measured_point import PointResult
from experiments.metrics import METRICS_VERSION
from experiments.plots.style import png
from experiments.point import PreparedPoint
from experiments.report import markdown_table, notes, paragraphs, point_rows, threads, variant
from experiments.strategy import Arm
from experiments.trace import RequestTimeline, Trace, as_rows, timelines
from experiments.tracking import LoggedRun
from quant.plan import WeightsPlan

NONE = "none"


def tags_before(point: PreparedPoint, sweep_id: str | None) -> dict[str, str]:
    """Tags that are known before the point is measured."""
    config, arm = point.config, point.arms.strategy
    parts = {
        "drafter": arm.drafter,
        "verifier": arm.verifier,
        "draft_length": arm.draft_length,
        "weights": arm.weights,
        "kv": arm.kv,
    }
    return {
        "kind": "point",
        "strategy": config.strategy,
        "variant": variant(arm),
        "model": config.model.target,
        **({"model_revision": config.model.revision} if config.model.revision else {}),
        "draft": _draft_model(point),
        **{name: NONE if part is None else part.name for name, part in parts.items()},
        "dtype": config.dtype,
        "device": config.device,
        "kernels": _kernels(point, arm),
        "workload": config.workload.name,
        "batch_size": str(config.batch_size),
        "config_hash": point.config_hash,
        "workload_hash": point.workload_hash,
        **git_tags(),
        "metrics_version": METRICS_VERSION,
        **({"sweep_id": sweep_id} if sweep_id else {}),
    }


def git_tags() -> dict[str, str]:
    """Commit and dirty flag; empty outside a checkout."""
    git = environment.git_state()
    if git["commit"] is None:
        return {}
    return {"git_commit": git["commit"], "git_dirty": str(git["dirty"]).lower()}


def _kernels(point: PreparedPoint, arm: Arm) -> str:
    """What multiplies by an arm's weights: the target's first, then a draft model's; `none` where they don't fit."""
    try:
        return ", ".join(point.kernels(arm))
    except ValueError:
        return NONE


def _plans(point: PreparedPoint, arm: Arm) -> dict[str, WeightsPlan | None]:
    """How an arm's weights will be stored; empty where they don't fit, which whoever loads them reports."""
    try:
        return point.weight_plans(arm)
    except ValueError:
        return {}


def record_setting(point: PreparedPoint, machine: Mapping[str, Any], logged: LoggedRun) -> None:
    """Log what is known before anything is loaded: a run that fails later has it too."""
    logged.log_text(yaml.safe_dump(asdict(point.config), sort_keys=False), "config/resolved.yaml")
    record_environment(machine, logged)
    for role, plan in _plans(point, point.arms.strategy).items():
        if plan is not None:
            title = f"# Weights of the {role}\n\n{markdown_table(weights_report.rows(plan))}"
            logged.log_text(f"{title}\n\n{weights_report.totals(plan)}\n", f"config/weights_{role}.md")
    if point.config.plugin is not None:
        logged.log_file(Path(point.config.plugin), "config")


def record_machine(
    before: Mapping[str, Any], measured: Measured, ceilings_run_id: str | None, logged: LoggedRun
) -> None:
    """Log what the machine did meanwhile: load, clocks and energy after, and where its ceilings are stored."""
    after = read_clocks()
    meanwhile = {
        "load": measured.load.as_dict(),
        "clocks_after": after,
        # from before the models were loaded to after outputs were compared
        "energy_j": energy_j(before["clocks"], after),
    }
    record_environment({**before, **meanwhile}, logged)
    if ceilings_run_id is not None:
        logged.set_tags({"ceilings": ceilings_run_id})


def record_environment(machine: Mapping[str, Any], logged: LoggedRun) -> None:
    """Log what is measured on; overwrites what was known earlier."""
    logged.log_text(json.dumps(machine, indent=2), "env/environment.json")


def record_traces(point: PreparedPoint, traces: Sequence[Trace], logged: LoggedRun) -> None:
    """Log the events and the texts of all arms."""
    logged.log_text(_json_lines(as_rows(traces)), "trace/events.jsonl")
    logged.log_text(_json_lines(_outputs(point, traces)), "outputs/tokens.jsonl")


def tracer(
    point: PreparedPoint, logged: LoggedRun, trouble: list[Exception]
) -> Callable[[Sequence[Trace]], None]:
    """Logs events as soon as they are measured; a store that fails is kept for later, the result goes on."""

    def log(traces: Sequence[Trace]) -> None:
        try:
            record_traces(point, traces, logged)
        except Exception as error:
            trouble.append(error)

    return log


def record_figures(found: Mapping[str, Figure], logged: LoggedRun) -> None:
    """Log figures as images, by file name."""
    for name, figure in found.items():
        logged.log_bytes(png(figure), f"plots/{name}")


def record_result(result: PointResult, logged: LoggedRun) -> None:
    """Log what a point showed; called after everything was timed."""
    strategy, measured = result.point.arms.strategy, result.measured
    logged.log_metrics(result.metrics)
    logged.log_curve("trace/step_ms", step_curve(result.timelines_of(strategy).values()))
    logged.set_tags(
        {
            "equivalence": result.equivalence,
            "lossless": str(result.lossless).lower(),
            **validity_tags(measured),
            **({"verdict": result.verdict} if result.verdict else {}),
        }
    )
    headline = f"{markdown_table(point_rows(result))}\n\n{paragraphs(notes(result))}\n"
    logged.set_description(headline)
    title = f"# {result.point.config.strategy}: {variant(strategy)}"
    arms = [arm.name for arm in result.point.arms.distinct]
    logged.log_text(f"{title}\n\n{headline}\n{details(measured, arms)}", "report.md")
    # Last, and slowest: a failure here costs pictures only.
    record_figures(figures.of_arms(measured, arms, setting_line(result.point)), logged)


def validity_tags(measured: Measured) -> dict[str, str]:
    """Whether times can be trusted, and what the machine did beside."""
    return {"validity": measured.validity, "foreign_cores": f"{measured.load.cores:.2f}"}


def details(measured: Measured, arms: Sequence[str]) -> str:
    """The end of a report: each arm's passes, and the same events under other benchmarks' definitions."""
    parts = []
    for arm in arms:
        if arm not in measured.failures:
            parts.append(f"## {arm}: passes\n\n{markdown_table(pass_kinds.rows(measured, arm))}\n")
            tools = other_tools.differences_table(measured.traces_of(arm))
            parts.append(f"## {arm}: as other tools define the same figures\n\n{tools}\n")
    return "\n".join(parts)


def step_curve(timelines_: Iterable[RequestTimeline]) -> list[tuple[int, float]]:
    """Mean step time in ms by output position: the position of a step's first token."""
    found: dict[int, list[float]] = {}
    for timeline in timelines_:
        for position, gap_ms in figures.gaps_by_position(timeline):
            found.setdefault(position, []).append(gap_ms)
    return [(position, sum(gaps) / len(gaps)) for position, gaps in sorted(found.items())]


def setting_line(point: PreparedPoint) -> str:
    config = point.config
    setting = f"{config.device}, {config.dtype}, {threads(config.threads)}, batch {config.batch_size}"
    return f"{config.model.target}, {setting}"


def _draft_model(point: PreparedPoint) -> str:
    """The draft model and its weight format; `none` for a drafter that has no model."""
    drafter = point.config.drafter
    if not hasattr(drafter, "weights"):
        return NONE
    weights = plugins.written_options("weights", drafter.weights)
    return f"{point.config.model.draft or point.config.model.target} {weights.name}"


def _outputs(point: PreparedPoint, traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    texts = {
        (trace.arm, trace.repeat, timeline.request_id): list(timeline.token_ids)
        for trace in traces
        for timeline in timelines(trace)
    }
    for (arm, repeat, request_id), token_ids in sorted(texts.items()):
        prompt = point.prompts[request_id]
        yield {
            "prompt_id": prompt.prompt_id,
            "category": prompt.category,
            "arm": arm,
            "repeat": repeat,
            "num_prompt_tokens": len(point.requests[request_id].prompt_ids),
            "token_ids": token_ids,
            "text": point.pool.tokenizer.decode(token_ids),
        }


def _json_lines(rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
