"""What a person reads: the plan before a run, the table after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from experiments.equivalence import EXACT
from experiments.point import MIB, Footprint, PointResult, PreparedPoint
from experiments.statistics import Ratio
from experiments.strategy import Arm

Format = Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


# Heading, metric, and how to print it. Speed-up and equivalence follow.
COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("TTFT ms", "latency/ttft_ms.p50", _milliseconds),
    ("ITL ms", "latency/itl_ms.p50", _milliseconds),
    ("TPOT ms", "latency/tpot_ms.p50", _milliseconds),
    ("tok/s", "throughput/decode_tok_s_aggregate", _milliseconds),
    ("tokens/pass", "spec/tokens_per_pass", lambda value: f"{value:.2f}"),
    ("accepted", "spec/acceptance_rate", _percent),
    ("weights MiB", "memory/weights_mib", lambda value: f"{value:.0f}"),
    ("KV MiB", "memory/kv_mib", _milliseconds),
)
MISSING = "-"


def plan_lines(point: PreparedPoint) -> list[str]:
    """What is about to be measured, before anything is loaded."""
    config = point.config
    tokens = sorted(len(request.prompt_ids) for request in point.requests)
    draft = "" if config.drafter is None else f", draft: {describe(config.drafter)}"
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
    """The headline table: one row per arm, medians."""
    table = Table(title=f"{result.point.config.strategy} on {result.point.config.model.target}, medians")
    headings, rows = _cells(result)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(result: PointResult) -> str:
    """The same table in Markdown."""
    headings, rows = _cells(result)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
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
            )
    for (request_id, repeat), reason in result.excluded.items():
        lines.append(
            f"no speed-up from prompt {result.point.prompts[request_id].prompt_id}, repeat {repeat}: {reason}"
        )
    spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in result.seconds.items())
    return [*lines, f"time: {spent}"]


def _shown(tokenizer: object, token_id: int | None) -> str:
    return "end" if token_id is None else repr(tokenizer.decode([token_id]))  # type: ignore[attr-defined]


def _cells(result: PointResult) -> tuple[list[str], list[list[str]]]:
    headings = ["arm", *(heading for heading, _, _ in COLUMNS), "speed-up", "equivalence"]
    return headings, [_row(result, arm) for arm in result.point.arms.distinct]


def _row(result: PointResult, arm: Arm) -> list[str]:
    metrics = result.metrics_of(arm)
    values = [form(metrics[name]) if name in metrics else MISSING for _, name, form in COLUMNS]
    if arm.name != result.point.arms.strategy.name:
        return [arm.name, *values, MISSING, MISSING]
    return [arm.name, *values, _ratio(result.speedups.get("decode_vs_plain")), result.equivalence]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return MISSING
    interval = "" if ratio.ci_low is None else f" [{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]"
    return f"{ratio.value:.2f}x{interval}"


def paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)
