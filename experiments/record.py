"""A measured point as an MLflow run: tags, parameters, metrics and artifacts under their contract names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from experiments import environment, plugins
from experiments.metrics import METRICS_VERSION, request_metrics
from experiments.point import PointResult, PreparedPoint
from experiments.report import markdown_table, notes, paragraphs, variant
from experiments.strategy import Arm
from experiments.trace import Trace, as_rows, timelines
from experiments.tracking import LoggedRun

NONE = "none"


def tags_before(point: PreparedPoint, sweep_id: str | None) -> dict[str, str]:
    """Tags that are known before the point is measured."""
    config, arm = point.config, point.arms.strategy
    git = environment.collect()["git"]
    parts = {
        "drafter": arm.drafter,
        "verifier": arm.verifier,
        "draft_length": arm.draft_length,
        "weights": arm.weights,
        "kv": arm.kv,
    }
    commit = (
        {} if git["commit"] is None else {"git_commit": git["commit"], "git_dirty": str(git["dirty"]).lower()}
    )
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
        "kernels": _kernels(arm),
        "workload": config.workload.name,
        "batch_size": str(config.batch_size),
        "config_hash": point.config_hash,
        "workload_hash": point.workload_hash,
        **commit,
        "metrics_version": METRICS_VERSION,
        **({"sweep_id": sweep_id} if sweep_id else {}),
    }


def _kernels(arm: Arm) -> str:
    """Whose kernels an arm's products run on: the target's weights first, then a draft model's."""
    formats = [arm.weights]
    if getattr(arm.drafter, "weights", ""):
        formats.append(plugins.default_options("weights", arm.drafter.weights))
    return ", ".join(dict.fromkeys(weights.kernels for weights in formats))


def record_setting(point: PreparedPoint, logged: LoggedRun) -> None:
    """Log what is known before anything is loaded: a run that fails later has it too."""
    logged.log_text(yaml.safe_dump(asdict(point.config), sort_keys=False), "config/resolved.yaml")
    logged.log_text(json.dumps(environment.collect(), indent=2), "env/environment.json")
    if point.config.plugin is not None:
        logged.log_file(Path(point.config.plugin), "config")


def record_traces(point: PreparedPoint, traces: Sequence[Trace], logged: LoggedRun) -> None:
    """Log the events and the texts of all arms."""
    logged.log_text(_json_lines(as_rows(traces)), "trace/events.jsonl")
    logged.log_text(_json_lines(_outputs(point, traces)), "outputs/tokens.jsonl")


def record_result(result: PointResult, logged: LoggedRun) -> None:
    """Log what a point showed; called after everything was timed."""
    logged.log_metrics(result.metrics)
    logged.log_curve("trace/step_ms", _step_curve(result))
    logged.set_tags(
        {
            "equivalence": result.equivalence,
            "lossless": str(result.lossless).lower(),
            "validity": result.validity,
        }
    )
    headline = f"{markdown_table(result)}\n\n{paragraphs(notes(result))}\n"
    logged.set_description(headline)
    title = f"# {result.point.config.strategy}: {variant(result.point.arms.strategy)}"
    logged.log_text(f"{title}\n\n{headline}", "report.md")


def _draft_model(point: PreparedPoint) -> str:
    """The draft model and its weight format; `none` for a drafter that has no model."""
    drafter = point.config.drafter
    if not hasattr(drafter, "weights"):
        return NONE
    return f"{point.config.model.draft or point.config.model.target} {drafter.weights}"


def _step_curve(result: PointResult) -> list[tuple[int, float]]:
    """Mean step time by output position: the position of a step's first token."""
    found: dict[int, list[float]] = {}
    for timeline in result.timelines_of(result.point.arms.strategy).values():
        position = timeline.commit_sizes[0]
        for gap_ms, size in zip(
            request_metrics(timeline).step_gaps_ms, timeline.commit_sizes[1:], strict=True
        ):
            found.setdefault(position, []).append(gap_ms)
            position += size
    return [(position, sum(gaps) / len(gaps)) for position, gaps in sorted(found.items())]


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
