"""A measured point as an MLflow run: tags, parameters, metrics and artifacts under their contract names."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import yaml

from experiments import environment, trace
from experiments.metrics import METRICS_VERSION, request_metrics
from experiments.point import PointResult, PreparedPoint
from experiments.report import describe, markdown_table, notes, paragraphs, variant
from experiments.tracking import LoggedRun


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
    return {
        "kind": "point",
        "strategy": config.strategy,
        "variant": variant(arm),
        "model": config.model.target,
        **({"model_revision": point.pool.revision} if point.pool.revision else {}),
        "draft": _draft(point),
        **{name: part.name for name, part in parts.items() if part is not None},
        "dtype": config.dtype,
        "device": config.device,
        "kernels": "torch",
        "workload": config.workload.name,
        "batch_size": str(config.batch_size),
        "config_hash": point.config_hash,
        "workload_hash": point.workload_hash,
        "git_commit": str(git["commit"]),
        "git_dirty": str(git["dirty"]).lower(),
        "metrics_version": METRICS_VERSION,
        **({"sweep_id": sweep_id} if sweep_id else {}),
    }


def record_result(result: PointResult, logged: LoggedRun) -> None:
    """Log what a point showed; called after everything was timed."""
    point = result.point
    logged.log_metrics(result.metrics)
    logged.log_curve("trace/step_ms", _step_curve(result))
    logged.set_tags(
        {
            "equivalence": result.equivalence,
            "lossless": str(result.lossless).lower(),
            "validity": result.validity,
        }
    )
    report = f"{markdown_table(result)}\n\n{paragraphs(notes(result))}\n"
    logged.set_description(report)
    logged.log_text(f"# {point.config.strategy}: {variant(point.arms.strategy)}\n\n{report}", "report.md")
    logged.log_text(yaml.safe_dump(asdict(point.config), sort_keys=False), "config/resolved.yaml")
    logged.log_text(json.dumps(environment.collect(), indent=2), "env/environment.json")
    logged.log_text(_json_lines(trace.as_rows(result.traces)), "trace/events.jsonl")
    logged.log_text(_json_lines(_outputs(result)), "outputs/tokens.jsonl")


def _draft(point: PreparedPoint) -> str:
    drafter = point.config.drafter
    if drafter is None:
        return "none"
    if not hasattr(drafter, "weights"):
        return describe(drafter)
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


def _outputs(result: PointResult) -> list[dict[str, Any]]:
    point = result.point
    return [
        {
            "prompt_id": point.prompts[request_id].prompt_id,
            "category": point.prompts[request_id].category,
            "arm": arm.name,
            "repeat": repeat,
            "num_prompt_tokens": len(point.requests[request_id].prompt_ids),
            "token_ids": list(timeline.token_ids),
            "text": point.pool.tokenizer.decode(list(timeline.token_ids)),
        }
        for arm in point.arms.distinct
        for (request_id, repeat), timeline in sorted(result.timelines_of(arm).items())
    ]


def _json_lines(rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
