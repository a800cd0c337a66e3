"""What a person reads: the plan before a run, the table after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from experiments.equivalence import EXACT, Comparison
from experiments.point import MIB, Footprint, PointResult, PreparedPoint
from experiments.statistics import Ratio
from experiments.strategy import Arm

Format = Callable[[float], str]


def _one_decimal(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


# Heading, metric, and how to print it. Speed-up and equivalence follow.
HEADLINES: tuple[tuple[str, str, Format], ...] = (
    ("TTFT, median ms", "latency/ttft_ms.p50", _one_decimal),
    ("ITL, median ms", "latency/itl_ms.p50", _one_decimal),
    ("TPOT, median ms", "latency/tpot_ms.p50", _one_decimal),
    ("tokens per second, all rows", "throughput/decode_tok_s_aggregate", _one_decimal),
    ("tokens per target pass", "spec/tokens_per_pass", lambda value: f"{value:.2f}"),
    ("draft tokens accepted", "spec/acceptance_rate", _percent),
    ("weights, MiB", "memory/weights_mib", lambda value: f"{value:.0f}"),
    ("KV cache, MiB", "memory/kv_mib", _one_decimal),
)
MISSING = "-"


def plan_lines(point: PreparedPoint) -> list[str]:
    """What is about to be measured, before anything is loaded."""
    config = point.config
    tokens = sorted(len(request.prompt_ids) for request in point.requests)
    draft = f", draft: {config.model.draft}" if config.model.draft else ""
    return [
        f"strategy   {config.strategy}: {variant(point.arms.strategy)}",
        f"references {', '.join(arm.name for arm in point.arms.distinct[1:]) or 'none: it is its own reference'}",
        f"model      {config.model.target}{draft}",
        f"machine    {config.device}, {config.dtype}, {config.threads} threads",
        f"workload   {config.workload.name}: {len(tokens)} prompts of {tokens[0]} to {tokens[-1]} tokens, "
        f"{config.workload.max_new_tokens} new tokens, batch {config.batch_size}, "
        f"{config.measure.repeats} x, seed {config.seed}",
    ]


def footprint_lines(footprints: dict[str, Footprint]) -> list[str]:
    """Bytes of each arm, once its weights are loaded."""
    return [
        f"memory     {arm}: weights {size.weights_bytes / MIB:.0f} MiB "
        f"({size.weights_read_bytes / MIB:.0f} MiB read per target pass), "
        f"KV {size.kv_bytes_per_token:,} bytes per token, {size.kv_allocated_bytes / MIB:.1f} MiB allocated"
        for arm, size in footprints.items()
    ]


def describe(options: object) -> str:
    """A plug-in's options as `name(field=value, ...)`."""
    fields = {key: value for key, value in vars(options).items() if key != "name"}
    inside = ", ".join(f"{key}={value}" for key, value in fields.items())
    name = getattr(options, "name", type(options).__name__)
    return f"{name}({inside})" if inside else name


def variant(arm: Arm) -> str:
    """The resolved parts of an arm in one line: what tells overridden presets apart."""
    parts = (arm.weights, arm.kv, arm.decoding, arm.drafter, arm.verifier, arm.draft_length)
    return " / ".join(describe(part) for part in parts if part is not None)


def console_table(result: PointResult) -> Table:
    """The headline table: one column per arm, medians over requests."""
    table = Table()
    heading, *rows = _cells(result)
    for index, cell in enumerate(heading):
        table.add_column(cell, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(result: PointResult) -> str:
    """The same table in Markdown."""
    heading, *rows = _cells(result)
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def notes(result: PointResult) -> list[str]:
    """What the table can't say: mismatches one by one, prompts left out, where the time went."""
    lines = []
    for comparison in result.comparisons:
        if comparison.grade != EXACT:
            prompt = result.point.prompts[comparison.request_id].prompt_id
            tokenizer = result.point.pool.tokenizer
            lines.append(
                f"{comparison.grade}: prompt {prompt}, new token {comparison.position}: "
                f"{_shown(tokenizer, comparison.token_id)}, twin {_shown(tokenizer, comparison.twin_token_id)}"
                f"{_distance(comparison)}"
            )
    for (request_id, repeat), reason in result.excluded.items():
        lines.append(
            f"no speed-up from prompt {result.point.prompts[request_id].prompt_id}, repeat {repeat}: {reason}"
        )
    lines += _why(result)
    if result.validity != "ok":
        lines.append(
            f"noisy: other processes kept {result.foreign_load.cores:.1f} cores busy meanwhile; "
            "trust no time of this run (threads=1 suffers least)"
        )
    spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in result.seconds.items())
    return [*lines, f"time: {spent}"]


def _why(result: PointResult) -> list[str]:
    """What a step of a speculative strategy cost and brought, beside a token of its twin."""
    metrics, twin = result.metrics, result.metrics_of(result.point.arms.twin)
    parts = ("spec/draft_ms.mean", "spec/verify_ms.mean", "spec/overhead_ms.mean")
    if not all(name in metrics for name in parts) or "latency/tpot_ms.p50" not in twin:
        return []
    draft, verify, rest = (metrics[name] for name in parts)
    return [
        f"a step: draft {draft:.1f} + verify {verify:.1f} + rest {rest:.1f} = {draft + verify + rest:.1f} ms "
        f"for {metrics['spec/tokens_per_pass']:.2f} tokens; its twin's token: {twin['latency/tpot_ms.p50']:.1f} ms"
    ]


def _distance(comparison: Comparison) -> str:
    if comparison.margin is None or comparison.rounding is None:
        return ""
    return f" (logits {comparison.margin:.2g} apart; rounding moves logits here by up to {comparison.rounding:.2g})"


def _shown(tokenizer: object, token_id: int | None) -> str:
    return "end" if token_id is None else repr(tokenizer.decode([token_id]))  # type: ignore[attr-defined]


def _cells(result: PointResult) -> list[list[str]]:
    arms = result.point.arms
    metrics = {arm.name: result.metrics_of(arm) for arm in arms.distinct}
    rows = [["arm", *metrics]]
    for heading, name, form in HEADLINES:
        rows.append(
            [heading, *(form(found[name]) if name in found else MISSING for found in metrics.values())]
        )
    references = [MISSING] * (len(metrics) - 1)
    rows.append(
        ["decode speed-up [95 % interval]", _ratio(result.speedups.get("decode_vs_plain")), *references]
    )
    rows.append(["output against its twin", result.equivalence, *references])
    return rows


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return MISSING
    interval = "" if ratio.ci_low is None else f" [{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]"
    return f"{ratio.value:.2f}x{interval}"


def paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)
