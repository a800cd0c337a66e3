"""What a person reads of a comparison: verdicts first, then the table, then what makes them doubtful."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from matplotlib.figure import Figure

from experiments import fidelity_report, weights_report
from experiments.bench import NOISY, UnfitPartsError
from experiments.comparison import ComparisonResult, PreparedComparison
from experiments.equivalence import DIVERGED, EXACT, NOT_APPLICABLE
from experiments.load import ForeignLoad
from experiments.measured_point import ratio_metrics
from experiments.metrics import prediction
from experiments.plots.intervals import IntervalRow, intervals
from experiments.point import PreparedPoint
from experiments.report import (
    HEADLINES,
    MISSING,
    Rows,
    arm_rows,
    excluded_lines,
    markdown_table,
    mismatch_line,
    noise_lines,
    paragraphs,
    parts_lines,
    ratio_text,
    step_lines,
    threads,
    time_line,
    variant,
    vocabulary_lines,
    workload_line,
)
from experiments.statistics import FASTER, SLOWER, TOO_FEW, Ratio, excluded_units
from quant.plan import WeightsPlan

NAME_CHARACTERS = 180
CATEGORY_CHARACTERS = 24  # in a metric's name, behind an arm's
RATIO_PARTS = ("ci_low", "ci_high")  # stand in a category's place too
CONSOLE_METRICS = (
    "latency/ttft_ms.p50",
    "latency/tpot_ms.p50",
    "spec/tokens_per_pass",
    "spec/acceptance_rate",
)


def plan_lines(comparison: PreparedComparison) -> list[str]:
    """What is about to be measured, before anything is loaded."""
    again = f", {comparison.baseline} a second time among them to see the noise" if comparison.again else ""
    return [
        *setting_lines(comparison),
        f"loads, warms up, then measures {comparison.num_block_runs} blocks of prompts in turn{again}",
    ]


def weights_lines(comparison: PreparedComparison, load: ForeignLoad) -> Iterator[str]:
    """What will multiply by quantized weights, for the arms that have any; the whole plans are logged with the arms.

    `load` is of while kernels were chosen.
    """
    lines: dict[str, list[str]] = {}
    planned: list[WeightsPlan | None] = []
    for label, point in comparison.points.items():
        try:
            plans = point.weight_plans(point.arms.strategy)
        except ValueError as error:  # the arm will fail, and the others go on
            yield f"weights    {label}: {error}"
            continue
        planned += plans.values()
        for role, plan in plans.items():
            if plan is not None:
                kernels = ", ".join(plan.kernels)
                lines.setdefault(f"{kernels}; {weights_report.totals(plan)}", []).append(f"{label}, {role}")
    for line, labels in lines.items():
        yield f"weights    {'; '.join(labels)}: {line}"
    doubt = weights_report.doubt_line(load, planned)
    if doubt:
        yield doubt


def setting_lines(comparison: PreparedComparison) -> list[str]:
    """The arms, and what they share."""
    model, config = _shared_model(comparison), comparison.shared.config
    lines = []
    for label, point in comparison.points.items():
        role = "baseline  " if label == comparison.baseline else "candidate "
        own = [] if model else [_model(point)]
        lines.append(f"{role} {label}: {', '.join([*own, variant(point.arms.strategy), *_draft(point)])}")
    return [
        *lines,
        *([f"model      {model}"] if model else []),
        f"machine    {config.device}, {threads(config.threads)}",
        workload_line(comparison.shared),
        *dict.fromkeys(line for point in comparison.points.values() for line in vocabulary_lines(point)),
    ]


def title(comparison: PreparedComparison) -> str:
    """Above a figure: what all its arms have in common."""
    model, config = _shared_model(comparison), comparison.shared.config
    setting = f"{config.device}, {threads(config.threads)}, batch {config.batch_size}"
    return f"{model}, {setting}" if model else setting


def rows(result: ComparisonResult) -> Rows:
    """One column per arm; the first row is the heading. What no arm has a figure for has no row."""
    labels = list(result.comparison.points)
    found = [
        *arm_rows(result.measured, labels),
        ["decode speed-up [95 % interval]", *_each(result, "decode")],
        ["total speed-up [95 % interval]", *_each(result, "total")],
        ["verdict on decode", *(_verdict(result, label) for label in labels)],
        ["texts equal to the baseline's", *(_same_texts(result, label) for label in labels)],
        ["output against its twin", *(result.equivalence(label) for label in labels)],
        *fidelity_report.rows([result.fidelities.get(label) for label in labels]),
        ["peak memory alone, MiB", *(_peak(result, label) for label in labels)],
    ]
    return [row for row in found if set(row[1:]) != {MISSING}]


def console_rows(result: ComparisonResult) -> Rows:
    """One row per arm, the most telling columns; the first row is the heading."""
    # Narrow enough for 80 characters with room for the arm's name; the verdicts have the rest.
    found = [["arm", "TTFT ms", "TPOT ms", "tok/pass", "accepted", "decode [95 %]"]]
    forms = {name: form for _, name, form in HEADLINES}
    for label in result.comparison.points:
        metrics = {} if label in result.measured.failures else result.measured.metrics_of(label)
        shown = [forms[name](metrics[name]) if name in metrics else MISSING for name in CONSOLE_METRICS]
        ratios = result.speedups.get(label)
        found.append([label, *shown, ratio_text(ratios.decode) if ratios else MISSING])
    return found


def category_rows(result: ComparisonResult) -> Rows:
    """Decode speed-ups, one column per candidate and one row per category of prompts; empty for one category."""
    if not result.by_category:
        return []
    found = [["category", *result.speedups]]
    for category, ratios in result.by_category.items():
        found.append([_one_line(category), *(ratio_text(ratios[label]) for label in result.speedups)])
    return found


def category_lines(result: ComparisonResult) -> Iterator[str]:
    """One line per candidate, without intervals."""
    for label in result.speedups if result.by_category else ():
        found = {category: ratios[label] for category, ratios in result.by_category.items()}
        values = [
            f"{_one_line(category)} {ratio.value:.2f}x"
            for category, ratio in found.items()
            if ratio is not None
        ]
        if values:
            yield f"{label}, decode by category: {', '.join(values)}"


def _one_line(category: str) -> str:
    return " ".join(category.split()) or "unnamed"


def verdict_lines(result: ComparisonResult) -> list[str]:
    """One line per candidate."""
    return [verdict_line(result, label) for label in result.comparison.candidates]


def verdict_line(result: ComparisonResult, label: str) -> str:
    """The verdict on a candidate with what qualifies it: whole answers, and whether the texts are the same."""
    if label in result.measured.failures:
        return f"{label}: failed, no figures ({_reason(result.measured.failures[label])})"
    ratios, (equal, number) = result.speedups[label], result.same_texts(label)
    fidelity = fidelity_report.clause(result.fidelities.get(label))
    parts = [
        sentence(result.verdict(label), ratios.decode),
        f"total {ratio_text(ratios.total)}",
        f"{equal} of {number} texts as the baseline's",
        *_against_twin(result, label),
        *([] if fidelity is None else [fidelity]),
    ]
    return f"{label}: {'; '.join(parts)}"


def _against_twin(result: ComparisonResult, label: str) -> list[str]:
    """The grade of a speculative arm; or that nobody could give one."""
    grade = result.equivalence(label)
    if grade != NOT_APPLICABLE:
        return [f"{grade} against its twin"]
    arm = result.comparison.points[label].arms.strategy
    if arm.drafter is None:
        return []
    return ["not held against its twin, which is not among the arms"]


def sentence(verdict: str, ratio: Ratio | None) -> str:
    """A verdict with its figure, as a reader would say it."""
    if ratio is None:
        return "no usable pair of texts, no verdict"
    figure = ratio_text(ratio)
    if verdict == FASTER:
        return f"decodes faster, {figure}"
    if verdict == SLOWER:
        return f"decodes slower, {figure}"
    if verdict == TOO_FEW:
        return f"no verdict from {verdict} of texts, {figure}"
    return f"no verdict, times are noisy, {figure}" if verdict == NOISY else f"{verdict}, {figure}"


def notes(result: ComparisonResult, most_ties: int | None = None) -> list[str]:
    """Mismatches, prompts left out, where passes went, how noisy it was."""
    measured, labels = result.measured, list(result.comparison.points)
    prompt_ids = [prompt.prompt_id for prompt in result.comparison.shared.prompts]
    one_dtype = "no shares of what the machine can do: arms differ in dtype"
    return [
        *category_lines(result),
        *_mismatch_lines(result, prompt_ids, most_ties),
        *_excluded_lines(result, prompt_ids),
        *_fidelity_lines(result),
        *_step_lines(result),
        *parts_lines(measured, labels),
        *([] if result.comparison.has_one_dtype else [one_dtype]),
        *noise_lines(measured),
        *(f"{label}: memory alone was not measured: {why}" for label, why in result.memory_errors.items()),
        time_line(result.seconds),
    ]


def _fidelity_lines(result: ComparisonResult) -> Iterator[str]:
    for label, fidelity in result.fidelities.items():
        yield from fidelity_report.lines(fidelity, result.measured.metrics_of(label), f"{label}, ")


def _step_lines(result: ComparisonResult) -> Iterator[str]:
    for label in result.comparison.points:
        if label not in result.measured.failures:
            yield from step_lines(arm_metrics(result, label), f"{label}, ")


def markdown(result: ComparisonResult, overview: Rows) -> str:
    """The whole report; `overview` has a row for each arm."""
    lines = [line.split(maxsplit=1) for line in setting_lines(result.comparison)]
    setting = paragraphs([f"**{what}** {rest}" for what, rest in lines])
    categories = category_rows(result)
    by_category = f"## Decode speed-up by category\n\n{markdown_table(categories)}\n\n" if categories else ""
    return (
        f"# Against {result.comparison.baseline}\n\n{paragraphs(verdict_lines(result))}\n\n"
        f"{markdown_table(overview)}\n\n{paragraphs(notes(result))}\n\n{by_category}"
        f"## All figures\n\n{markdown_table(rows(result))}\n\n## Setting\n\n{setting}\n"
    )


def arm_description(result: ComparisonResult, label: str, report_run_id: str) -> str:
    """For the run of one arm: what came of it, and where the rest is."""
    role = f"{label}: the baseline" if label == result.comparison.baseline else verdict_line(result, label)
    return (
        f"{role}\n\nMeasured in turn with {len(result.comparison.points) - 1} other arms, baseline "
        f"{result.comparison.baseline}: events, texts and report are in run {report_run_id}.\n"
    )


def metrics(result: ComparisonResult) -> dict[str, float]:
    """Every candidate's ratios under a name of its own, for the report run."""
    found = ratio_metrics("noise/again_vs_itself", result.measured.noise_floor)
    names = metric_names(result.comparison.points)
    for label, ratios in result.speedups.items():
        for what, ratio in vars(ratios).items():
            found.update(ratio_metrics(f"compare/{names[label]}.{what}", ratio))
    categories = metric_names(result.by_category, "category", CATEGORY_CHARACTERS)
    for category, speedups in result.by_category.items():
        for label, ratio in speedups.items():
            found.update(ratio_metrics(f"compare/{names[label]}.decode.{categories[category]}", ratio))
    return found


def metric_names(
    labels: Iterable[str], kind: str = "arm", num_characters: int = NAME_CHARACTERS
) -> dict[str, str]:
    """For each label a name of its own that MLflow allows in a metric's, which has 250 characters at most."""
    found: dict[str, str] = {}
    for number, label in enumerate(labels):
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", label).strip("_")[:num_characters]
        is_taken = name in (*found.values(), *RATIO_PARTS, "")
        found[label] = f"{name}_{kind}{number}".strip("_") if is_taken else name
    return found


def arm_metrics(result: ComparisonResult, label: str) -> dict[str, float]:
    """Everything that is logged for one arm, by contract name."""
    found = result.measured.metrics_of(label)
    found["latency/tokenize_ms.mean"] = result.comparison.points[label].tokenize_ms
    for reference, ratios in result.references(label).items():
        found.update(ratio_metrics(f"speedup/decode_vs_{reference}", ratios.decode))
        found.update(ratio_metrics(f"speedup/total_vs_{reference}", ratios.total))
    plain = result.reference(label, "plain")
    if plain is not None:
        found.update(prediction(result.measured.traces_of(label), result.measured.traces_of(plain)))
    found.update(result.quality(label))
    if label in result.fidelities:
        found.update(result.fidelities[label].metrics)
    if label in result.memories:
        found.update(result.memories[label].metrics())
    return found


def interval_figure(result: ComparisonResult) -> dict[str, Figure]:
    """The intervals of all candidates and of the A/A arm, by file name; empty where there is none."""
    found = [
        IntervalRow(
            label, ratios.decode.value, ratios.decode.ci_low, ratios.decode.ci_high, result.verdict(label)
        )
        for label, ratios in result.speedups.items()
        if ratios.decode is not None
    ]
    floor = result.measured.noise_floor
    if floor is not None and result.measured.again is not None:
        found.append(
            IntervalRow(result.measured.again[0], floor.value, floor.ci_low, floor.ci_high, "the noise")
        )
    figure = intervals(
        found,
        f"Decode speed-up over {result.comparison.baseline}, 95 % intervals",
        "TPOT of the baseline / TPOT of the arm\n(right of 1 is faster)",
    )
    return {} if figure is None else {"intervals.png": figure}


def _each(result: ComparisonResult, what: str) -> Iterator[str]:
    for label in result.comparison.points:
        ratios = result.speedups.get(label)
        yield MISSING if ratios is None else ratio_text(getattr(ratios, what))


def _verdict(result: ComparisonResult, label: str) -> str:
    if label in result.measured.failures:
        return "failed"
    return result.verdict(label) if label in result.speedups else MISSING


def _same_texts(result: ComparisonResult, label: str) -> str:
    if label not in result.speedups:
        return MISSING
    equal, number = result.same_texts(label)
    return f"{equal} of {number}"


def _peak(result: ComparisonResult, label: str) -> str:
    memory = result.memories.get(label)
    return MISSING if memory is None else f"{memory.peak_mib:.0f}"


def _mismatch_lines(result: ComparisonResult, prompt_ids: Sequence[str], most: int | None) -> Iterator[str]:
    """One for each mismatch of an arm, however many repeats had it; near ties beyond `most` per arm are counted."""
    for label, grades in result.grades.items():
        tokenizer = result.comparison.points[label].pool.tokenizer
        found = Counter(
            (comparison.grade, mismatch_line(comparison, prompt_ids, tokenizer))
            for comparison in grades
            if comparison.grade != EXACT
        )
        bugs = [(line, times) for (grade, line), times in found.items() if grade == DIVERGED]
        ties = [(line, times) for (grade, line), times in found.items() if grade != DIVERGED]
        for line, times in [*bugs, *ties[:most]]:
            yield f"{label}, {line}{f', {times} times' if times > 1 else ''}"
        if most is not None and len(ties) > most:
            yield f"{label}, and {len(ties) - most} more near ties, one line each in report.md"


def _excluded_lines(result: ComparisonResult, prompt_ids: Sequence[str]) -> Iterator[str]:
    """The baseline's own once, then what each candidate adds."""
    baseline = excluded_units(result.measured.timelines_of(result.comparison.baseline))
    yield from excluded_lines(baseline, prompt_ids)
    for label in result.speedups:
        ours = excluded_units(result.measured.timelines_of(label))
        added = {unit: reason for unit, reason in ours.items() if unit not in baseline}
        yield from (f"{label}, {line}" for line in excluded_lines(added, prompt_ids))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UnfitPartsError) else f"{type(error).__name__}: {text}"


def _shared_model(comparison: PreparedComparison) -> str | None:
    """The target and its dtype, where all arms have the same."""
    models = {_model(point) for point in comparison.points.values()}
    return models.pop() if len(models) == 1 else None


def _model(point: PreparedPoint) -> str:
    return f"{point.config.model.target}, {point.config.dtype}"


def _draft(point: PreparedPoint) -> list[str]:
    """The draft model, where the arm's drafter has one that is not the target."""
    draft = point.config.model.draft
    return [f"draft {draft}"] if draft and hasattr(point.config.drafter, "weights") else []
