"""What a person reads: the plan before a run, the table after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments import fidelity_report, weights_report
from experiments.bench import MIB, OK, Footprint, Measured
from experiments.console_table import ConsoleTable
from experiments.equivalence import EXACT, Comparison
from experiments.load import ForeignLoad
from experiments.measured_point import PointResult
from experiments.memory import ProcessMemory
from experiments.point import PreparedPoint
from experiments.roofline import PassParts
from experiments.statistics import Ratio, Unit, detectable_frac
from experiments.strategy import Arm
from quant.plan import WeightsPlan

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
    ("of the read bandwidth, decoding", "roofline/mbu_target_pct", lambda value: f"{value:.0f} %"),
    ("of the arithmetic, prefill", "roofline/mfu_prefill_pct", lambda value: f"{value:.0f} %"),
)
MISSING = "-"


def plan_lines(point: PreparedPoint) -> list[str]:
    """What is about to be measured, before anything is loaded."""
    config = point.config
    uses_draft = config.model.draft and hasattr(config.drafter, "weights")
    draft = f", draft: {config.model.draft}" if uses_draft else ""
    return [
        f"strategy   {config.strategy}: {variant(point.arms.strategy)}",
        f"references {', '.join(arm.name for arm in point.arms.distinct[1:]) or 'none: it is its own reference'}",
        f"model      {config.model.target}{draft}",
        f"machine    {config.device}, {config.dtype}, {threads(config.threads)}",
        workload_line(point),
        *vocabulary_lines(point),
    ]


def vocabulary_lines(point: PreparedPoint) -> list[str]:
    """What is cut where models have logits of different widths."""
    cut = [
        f"{model} has {config.vocab_size}"
        for model, config in point.pool.configs.items()
        if config.vocab_size > point.vocab_size
    ]
    if not cut:
        return []
    return [
        f"vocabulary {point.vocab_size} tokens, which all models have logits for; the rest is cut: {', '.join(cut)}"
    ]


def threads(number: int | None) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def workload_line(point: PreparedPoint) -> str:
    config = point.config
    tokens = sorted(len(request.prompt_ids) for request in point.requests)
    return (
        f"workload   {config.workload.name}: {len(tokens)} prompts of {tokens[0]} to {tokens[-1]} tokens, "
        f"{config.workload.max_new_tokens} new tokens, batch {config.batch_size}, "
        f"{config.measure.repeats} x, seed {config.seed}"
    )


def footprint_lines(footprints: Mapping[str, Footprint]) -> list[str]:
    """Bytes of each arm, once its weights are loaded."""
    return [
        f"memory     {arm}: weights {size.weights_bytes / MIB:.0f} MiB "
        f"({size.target.weights_read_bytes / MIB:.0f} MiB read per target pass), "
        f"KV {size.target.kv_bytes_per_token:,.0f} bytes per token, {size.kv_allocated_bytes / MIB:.1f} MiB allocated"
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


def weights_lines(plans: Mapping[str, WeightsPlan | None], load: ForeignLoad) -> list[ConsoleTable | str]:
    """A table and a line for each model whose weights are not stored as they come.

    `load` is of while kernels were chosen.
    """
    lines: list[ConsoleTable | str] = []
    for role, plan in plans.items():
        if plan is not None:
            lines += [
                f"weights of the {role}",
                ConsoleTable(weights_report.rows(plan)),
                weights_report.totals(plan),
            ]
    doubt = weights_report.doubt_line(load, plans.values())
    return [*lines, *([doubt] if doubt else [])]


Rows = list[list[str]]


def point_rows(result: PointResult) -> Rows:
    """The headline table of a point: one column per arm, medians over requests; the first row is the heading."""
    distinct = result.point.arms.distinct
    arms = [arm.name for arm in distinct]
    references = [MISSING] * (len(arms) - 1)
    speedup, verdict = result.speedups.get("decode_vs_plain"), result.verdict or MISSING
    return [
        *arm_rows(result.measured, arms),
        ["decode speed-up [95 % interval]", ratio_text(speedup), *references],
        ["verdict", verdict, *references],
        ["output against its twin", result.equivalence, *references],
        # Speculation adds nothing: the twin's laws are the strategy's.
        *fidelity_report.rows([None if arm.keeps_laws else result.fidelity for arm in distinct]),
    ]


def arm_rows(measured: Measured, arms: Sequence[str]) -> Rows:
    """What each arm shows by itself; a failed one has no figures."""
    metrics = {arm: {} if arm in measured.failures else measured.metrics_of(arm) for arm in arms}
    rows = [["arm", *arms]]
    for heading, name, form in HEADLINES:
        rows.append(
            [heading, *(form(found[name]) if name in found else MISSING for found in metrics.values())]
        )
    return rows


def markdown_table(rows: Rows) -> str:
    """The same in Markdown."""
    heading, *body = rows
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def notes(result: PointResult) -> list[str]:
    """What the table can't say: mismatches one by one, prompts left out, where the time went, how noisy it was."""
    point, measured = result.point, result.measured
    prompt_ids = [prompt.prompt_id for prompt in point.prompts]
    lines = [
        mismatch_line(comparison, prompt_ids, point.pool.tokenizer)
        for comparison in result.comparisons
        if comparison.grade != EXACT
    ]
    lines += excluded_lines(result.excluded, prompt_ids)
    lines += fidelity_report.lines(result.fidelity, result.metrics)
    lines += step_lines(result.metrics)
    lines += parts_lines(measured, [point.arms.strategy.name])
    lines += noise_lines(measured)
    if result.comparisons:
        lines.append(weights_report.exactness_line(point.weight_plans(point.arms.strategy)))
    lines.append(weights_report.first_use_line(point.pool.conversion_s))
    if result.memory is not None:
        lines.append(
            f"memory of the strategy alone, in its own process: peak {_peaks(result.memory)}, afterwards "
            f"{result.memory.steady_mib:.0f} MiB, of which {result.memory.base_mib:.0f} MiB before the model"
        )
    if result.memory_error is not None:
        lines.append(f"memory of the strategy alone was not measured: {result.memory_error}")
    return [*filter(None, lines), time_line(result.seconds)]


def _peaks(memory: ProcessMemory) -> str:
    """The most it held, and in which phase, as far as that is known."""
    phases = {
        "loading": memory.peak_load_mib,
        "prefill": memory.peak_prefill_mib,
        "decode": memory.peak_decode_mib,
    }
    known = [f"{phase} {mib:.0f}" for phase, mib in phases.items() if mib is not None]
    return f"{memory.peak_mib:.0f} MiB" + (f" ({', '.join(known)})" if known else "")


def mismatch_line(comparison: Comparison, prompt_ids: Sequence[str], tokenizer: object) -> str:
    return (
        f"{comparison.grade}: prompt {prompt_ids[comparison.request_id]}, new token {comparison.position}: "
        f"{_shown(tokenizer, comparison.token_id)}, twin {_shown(tokenizer, comparison.twin_token_id)}"
        f"{_distance(comparison)}"
    )


def excluded_lines(excluded: Mapping[Unit, str], prompt_ids: Sequence[str]) -> list[str]:
    return [
        f"no speed-up from prompt {prompt_ids[request_id]}, repeat {repeat}: {reason}"
        for (request_id, repeat), reason in excluded.items()
    ]


def parts_lines(measured: Measured, arms: Iterable[str]) -> list[str]:
    """Where each arm's mean passes went, beside what this machine can do."""
    return [
        f"{arm}, a {label} pass: {_parts(parts)}"
        for arm in arms
        if arm not in measured.failures
        for label, parts in measured.parts_of(arm).items()
    ]


def noise_lines(measured: Measured) -> list[str]:
    """How far an arm is from itself, and what makes figures doubtful."""
    lines = []
    if measured.again is not None and measured.noise_floor is not None:
        detectable = detectable_frac(measured.noise_floor)
        seen = (
            ""
            if detectable is None
            else f"; {100 * detectable:.1f} % would show, if it were so on every prompt (80 % power)"
        )
        lines.append(f"noise: {measured.again[1]} against itself {ratio_text(measured.noise_floor, 3)}{seen}")
    if measured.ceilings is not None and measured.ceilings.is_noisy:
        lines.append("what the machine can do was measured beside a busy process: shares of it are too large")
    lines += [f"{arm}: step times were still moving after the warm-up" for arm in measured.unsettled]
    if measured.validity == OK:
        return lines
    if measured.load.is_noisy:
        why = f"other processes kept {measured.load.cores:.1f} cores busy meanwhile"
        return [*lines, f"noisy: {why}; trust no time of this run (threads=1 suffers least)"]
    return [*lines, "noisy: an arm differs from itself; trust no time of this run, more repeats may help"]


def time_line(seconds: Mapping[str, float]) -> str:
    return "time: " + ", ".join(f"{what} {value:.1f} s" for what, value in seconds.items())


def _parts(parts: PassParts) -> str:
    rest = f"+ rest {parts.rest_ms:.1f}" if parts.rest_ms >= 0 else f"(overlapping by {-parts.rest_ms:.1f})"
    return (
        f"{parts.pass_ms:.1f} ms = reading weights {parts.floor_ms:.1f} + KV {parts.kv_ms:.1f} "
        f"+ overhead {parts.overhead_ms:.1f} {rest}"
    )


def step_lines(metrics: Mapping[str, float], prefix: str = "") -> list[str]:
    """What a step of a speculative arm cost and brought; nothing for other arms."""
    parts = ("spec/draft_ms.mean", "spec/verify_ms.mean", "spec/overhead_ms.mean")
    if not all(name in metrics for name in parts):
        return []
    draft, verify, rest = (metrics[name] for name in parts)
    return [
        f"{prefix}a step: draft {draft:.1f} + verify {verify:.1f} + rest {rest:.1f} = {draft + verify + rest:.1f} ms "
        f"for {metrics['spec/tokens_per_pass']:.2f} tokens{_predicted(metrics)}"
    ]


def _predicted(metrics: Mapping[str, float]) -> str:
    predicted, least = metrics.get("spec/predicted_speedup"), metrics.get("spec/break_even_acceptance")
    if predicted is None:
        return ""
    pays = (
        "never pays at these costs"
        if least is None
        else f"pays where {least:.2f} of the judged draft tokens stand"
    )
    return f"; predicted speed-up: {predicted:.2f}x, {pays}"


def _distance(comparison: Comparison) -> str:
    if comparison.margin is None or comparison.rounding is None:
        return ""
    return f" (logits {comparison.margin:.2g} apart; rounding moves logits here by up to {comparison.rounding:.2g})"


def _shown(tokenizer: object, token_id: int | None) -> str:
    return "end" if token_id is None else repr(tokenizer.decode([token_id]))  # type: ignore[attr-defined]


def ratio_text(ratio: Ratio | None, decimals: int = 2) -> str:
    if ratio is None:
        return MISSING
    value = f"{ratio.value:.{decimals}f}x"
    if ratio.ci_low is None or ratio.ci_high is None:
        return value
    return f"{value} [{ratio.ci_low:.{decimals}f}, {ratio.ci_high:.{decimals}f}]"


def paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)
