"""What a person reads: the plan, the table, the notes; and the record's tags that repeat them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from rich.console import Console
from toy_folders import repeating_prompts, save_model, save_prompts
from toy_traces import timeline

from experiments import record, report, sweep_report
from experiments.bench import Measured
from experiments.config import compose_run
from experiments.console_table import ConsoleTable
from experiments.equivalence import DIVERGED, EXACT, NEAR_TIE, Comparison
from experiments.hardware import GEMM_GFLOP_S, OVERHEAD_MS, READ_GB_S, Values
from experiments.load import ForeignLoad
from experiments.measured_point import PointResult, measure_point
from experiments.memory import ProcessMemory
from experiments.point import prepare
from experiments.roofline import PassParts
from experiments.statistics import MIN_PAIRS, TOO_FEW, Ratio
from experiments.strategy import arms_of
from experiments.tracking import StoredRun

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET, BUSY = ForeignLoad(0.0), ForeignLoad(1.25)


def known(key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
    """Ceilings that were measured elsewhere."""
    return {READ_GB_S: 32.0, GEMM_GFLOP_S: 1024.0, OVERHEAD_MS: 0.125}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> PointResult:
    root = tmp_path_factory.mktemp("report")
    save_model(root / "target")
    save_prompts(root / "prompts.jsonl", repeating_prompts((3, 6, 5)))
    overrides = [
        "strategy=prompt_lookup",
        f"model.target={root / 'target'}",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
        "workload.max_new_tokens=20",
        "dtype=fp32",
        "threads=1",
        "seed=7",
        "measure.warmup=0",
        "measure.repeats=3",  # one prompt ends at once: 2 x 3 pairs
        "measure.memory=false",
    ]
    measured = measure_point(prepare(compose_run(overrides)), remember=known)
    return replace(measured, measured=replace(measured.measured, load=QUIET))


def with_speedup(result: PointResult, ratio: Ratio | None) -> PointResult:
    changed = replace(result)
    vars(changed)["speedups"] = {"decode_vs_plain": ratio}
    return changed


def with_noise_floor(measured: Measured, ratio: Ratio | None, load: ForeignLoad = QUIET) -> Measured:
    changed = replace(measured, load=load)
    vars(changed)["noise_floor"] = ratio
    return changed


def table_of(result: PointResult) -> dict[str, list[str]]:
    return {heading: row for heading, *row in report.point_rows(result)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_plan_names_everything_that_is_about_to_run(result: PointResult) -> None:
    text = "\n".join(report.plan_lines(result.point))
    for part in (
        "prompt_lookup(min_ngram=1, max_ngram=3, prefer=recent)",
        "fixed(max=4)",
        "reference",
        str(result.point.config.model.target),
        "cpu, fp32, 1 thread",
        "3 prompts of 6 to 12 tokens, 20 new tokens, batch 1, 3 x, seed 7",
    ):
        assert part in text


def test_the_plan_of_a_baseline_says_that_it_has_no_reference(result: PointResult) -> None:
    config = replace(
        result.point.config,
        strategy="baseline",
        decoding=result.point.arms.twin.decoding,
        drafter=None,
        verifier=None,
        draft_length=None,
    )
    point = replace(result.point, config=config, arms=arms_of(config))
    assert any("none: it is its own reference" in line for line in report.plan_lines(point))


def test_sizes_are_one_line_per_arm(result: PointResult) -> None:
    one = result.footprints["reference"]
    target = replace(one.target, kv_bytes_per_token=23040, weights_read_bytes=2 * 2**20)
    sizes = {"a": replace(one, weights_bytes=3 * 2**20, target=target)}
    (line,) = report.footprint_lines(sizes)
    assert "a: weights 3 MiB (2 MiB read per target pass)" in line
    assert "23,040 bytes per token" in line


def test_a_variant_is_the_resolved_parts() -> None:
    one = arms_of(compose_run(["strategy=prompt_lookup"])).strategy
    other = arms_of(compose_run(["strategy=prompt_lookup", "draft_length.max=6"])).strategy
    assert report.variant(one) == (
        "plain / dense / speculative / prompt_lookup(min_ngram=1, max_ngram=3, prefer=recent) / token / fixed(max=4)"
    )
    assert report.variant(other) == report.variant(one).replace("max=4", "max=6")
    assert report.variant(arms_of(compose_run(["strategy=baseline"])).strategy) == (
        "plain / dense / autoregressive"
    )


def test_the_table_has_a_column_per_arm_and_the_metrics_own_values(result: PointResult) -> None:
    table = table_of(result)
    assert next(iter(table.items())) == ("arm", ["prompt_lookup", "reference"])  # the A/A arm is in the notes
    ours = result.metrics
    theirs = result.metrics_of(result.point.arms.plain)
    assert table["TTFT, median ms"] == [f"{m['latency/ttft_ms.p50']:.1f}" for m in (ours, theirs)]
    assert table["tokens per target pass"] == [f"{ours['spec/tokens_per_pass']:.2f}", "1.00"]
    for heading, metric in (
        ("of the read bandwidth, decoding", "roofline/mbu_target_pct"),
        ("of the arithmetic, prefill", "roofline/mfu_prefill_pct"),
    ):
        assert table[heading] == [f"{m[metric]:.0f} %" for m in (ours, theirs)]
    assert table["output against its twin"] == ["exact", "-"]
    low, high = ours["speedup/decode_vs_plain.ci_low"], ours["speedup/decode_vs_plain.ci_high"]
    assert table["decode speed-up [95 % interval]"] == [
        f"{ours['speedup/decode_vs_plain']:.2f}x [{low:.2f}, {high:.2f}]",
        "-",
    ]
    assert table["verdict"] == [result.verdict, "-"]


def test_rows_are_markdown_with_a_rule_below_the_heading() -> None:
    assert report.markdown_table([["arm", "a", "b"], ["TTFT", "1.0", "-"]]).splitlines() == [
        "| arm | a | b |",
        "| --- | ---: | ---: |",
        "| TTFT | 1.0 | - |",
    ]


def test_the_console_shows_the_same_table(result: PointResult) -> None:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(ConsoleTable(report.point_rows(result)))
    shown = captured.get()
    for row in report.point_rows(result):
        (line,) = (line for line in shown.splitlines() if row[0] in line)
        assert [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] == row


def test_a_wide_table_keeps_its_names_and_figures_and_breaks_its_headings() -> None:
    heading = ["arm", *("a heading of several words" for _ in range(8))]
    rows = [heading, *([f"baseline kv=kv_int{bits}", *("1,234.5" for _ in range(8))] for bits in (8, 4))]
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(ConsoleTable(rows))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 120
    for name, *figures in rows[1:]:
        (line,) = (line for line in lines if name in line)
        assert line.count("1,234.5") == len(figures)


def test_columns_that_find_no_room_stand_below_with_the_names() -> None:
    rows = [["arm", *"abcdefgh"], ["baseline kv=kv_int8", *(f"{number},000,000" for number in range(8))]]
    console = Console(width=60, color_system=None)
    with console.capture() as captured:
        console.print(ConsoleTable(rows))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 60
    found = [line for line in lines if "kv_int8" in line]
    assert len(found) == 3
    assert [cell for cell in rows[1][1:] if not any(cell in line for line in found)] == []


def test_a_failed_arm_has_a_column_without_figures(result: PointResult) -> None:
    measured = replace(result.measured, failures={"reference": RuntimeError("x")})
    heading, *rows = report.arm_rows(measured, ["prompt_lookup", "reference"])
    assert heading == ["arm", "prompt_lookup", "reference"]
    assert {row[2] for row in rows} == {"-"}
    assert rows[0][1] != "-"
    assert list(report.parts_lines(measured, ["reference"])) == []


def test_a_ratio_without_an_interval_shows_none(result: PointResult) -> None:
    table = table_of(with_speedup(result, Ratio(1.5, None, None, MIN_PAIRS - 1)))
    assert table["decode speed-up [95 % interval]"] == ["1.50x", "-"]
    assert table["verdict"] == [TOO_FEW, "-"] == ["fewer than 6 pairs", "-"]
    table = table_of(with_speedup(result, None))
    assert table["decode speed-up [95 % interval]"] == ["-", "-"]
    assert table["verdict"] == [TOO_FEW, "-"]


def test_a_verdict_is_of_the_interval_and_none_of_a_noisy_run(result: PointResult) -> None:
    same = Ratio(1.0, 0.99, 1.01, MIN_PAIRS)
    for load, expected in ((QUIET, "faster"), (BUSY, "noisy")):
        changed = replace(result, measured=with_noise_floor(replace(result.measured, again=None), same, load))
        assert table_of(with_speedup(changed, Ratio(1.5, 1.4, 1.6, MIN_PAIRS)))["verdict"] == [expected, "-"]


def test_every_mismatch_is_told_with_its_tokens(result: PointResult) -> None:
    graded = replace(
        result,
        comparisons=[
            Comparison(0, NEAR_TIE, 3, 5, 9, margin=0.0625, rounding=0.25),
            Comparison(1, DIVERGED, 4, 7, None),
            Comparison(0, EXACT),
        ],
    )
    first, second, *rest = report.notes(graded)
    assert first.startswith("near_tie: prompt 1, new token 3: 'w5', twin 'w9' (logits 0.062 apart")
    assert first.endswith("up to 0.25)")
    assert second == "diverged: prompt 2, new token 4: 'w7', twin end"
    assert not [line for line in rest if line.startswith("exact")]
    assert graded.equivalence == "diverged"
    assert not graded.lossless


def test_the_parts_of_a_pass_are_told_and_an_overlap_is_no_rest(
    result: PointResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"target": PassParts(10.0, 5.0, 1.0, 2.5), "draft": PassParts(2.0, 1.0, 0.5, 0.75)}
    monkeypatch.setattr(Measured, "parts_of", lambda *_: parts)
    target = "10.0 ms = reading weights 5.0 + KV 1.0 + overhead 2.5 + rest 1.5"
    draft = "2.0 ms = reading weights 1.0 + KV 0.5 + overhead 0.8 (overlapping by 0.2)"
    assert report.parts_lines(result.measured, ["a"]) == [
        f"a, a target pass: {target}",
        f"a, a draft pass: {draft}",
    ]
    assert f"prompt_lookup, a target pass: {target}" in report.notes(result)


def test_noise_is_told_with_the_difference_that_would_show(result: PointResult) -> None:
    measured = with_noise_floor(result.measured, Ratio(1.002, 0.99, 1.01, MIN_PAIRS, sd_log=0.01))
    vars(measured)["validity"] = "ok"
    # Six pairs: t quantiles of 5 degrees of freedom, 2.571 + 0.920, times 0.01 / sqrt(6).
    assert report.noise_lines(measured) == [
        "noise: reference against itself 1.002x [0.990, 1.010]; "
        "1.4 % would show, if it were so on every prompt (80 % power)"
    ]
    few = with_noise_floor(result.measured, Ratio(1.002, None, None, 2, sd_log=0.01))
    vars(few)["validity"] = "ok"
    assert report.noise_lines(few) == ["noise: reference against itself 1.002x"]
    none = replace(result.measured, again=None, unsettled=["twin"])
    assert report.noise_lines(none) == ["twin: step times were still moving after the warm-up"]


def test_what_makes_a_run_noisy_is_told(result: PointResult) -> None:
    busy = report.noise_lines(with_noise_floor(result.measured, None, BUSY))
    assert busy == [
        "noisy: other processes kept 1.2 cores busy meanwhile; trust no time of this run (threads=1 suffers least)"
    ]
    different = with_noise_floor(result.measured, None)
    vars(different)["validity"] = "noisy"
    assert report.noise_lines(different) == [
        "noisy: an arm differs from itself; trust no time of this run, more repeats may help"
    ]


def test_memory_is_told_or_why_it_is_not_known(result: PointResult) -> None:
    assert not [line for line in report.notes(result) if line.startswith("memory")]
    known = replace(result, memory=ProcessMemory(900.4, 700.0, 400.0))
    assert (
        "memory of the strategy alone, in its own process: peak 900 MiB, afterwards 700 MiB, "
        "of which 400 MiB before the model"
    ) in report.notes(known)
    failed = replace(result, memory_error="killed by SIGKILL")
    assert "memory of the strategy alone was not measured: killed by SIGKILL" in report.notes(failed)


def test_the_last_note_is_where_the_time_went(result: PointResult) -> None:
    timed = replace(result, seconds={"load": 1.25, "compare outputs": 0.5})
    assert report.notes(timed)[-1] == "time: load 1.2 s, compare outputs 0.5 s"


def test_prompts_without_a_speedup_are_listed_with_the_reason(
    result: PointResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(result), "excluded", {(1, 2): "ends in a loop"}, raising=True)
    assert "no speed-up from prompt 2, repeat 2: ends in a loop" in report.notes(result)


def test_the_step_note_adds_up(result: PointResult) -> None:
    (line,) = (line for line in report.notes(result) if line.startswith("a step: "))
    metrics = result.metrics
    total = sum(metrics[f"spec/{part}_ms.mean"] for part in ("draft", "verify", "overhead"))
    assert f"= {total:.1f} ms for {metrics['spec/tokens_per_pass']:.2f} tokens" in line
    predicted = f"{metrics['spec/predicted_speedup']:.2f}x"
    least = metrics.get("spec/break_even_acceptance")
    pays = (
        "never pays at these costs"
        if least is None
        else f"pays where {least:.2f} of the judged draft tokens stand"
    )
    assert line.endswith(f"; predicted speed-up: {predicted}, {pays}")


# --- tags and the report of a sweep


def test_tags_say_what_was_run(result: PointResult) -> None:
    tags = record.tags_before(result.point, "abc")
    assert tags["variant"] == report.variant(result.point.arms.strategy)
    assert (tags["kind"], tags["strategy"], tags["sweep_id"]) == ("point", "prompt_lookup", "abc")
    assert (tags["drafter"], tags["verifier"], tags["draft_length"]) == ("prompt_lookup", "token", "fixed")
    assert tags["draft"] == "none"
    assert "sweep_id" not in record.tags_before(result.point, None)
    assert all(isinstance(value, str) for value in tags.values())


def test_tags_say_whether_times_can_be_trusted(result: PointResult) -> None:
    quiet = replace(result.measured, again=None)
    assert record.validity_tags(quiet) == {"validity": "ok", "foreign_cores": "0.00"}
    assert record.validity_tags(replace(quiet, load=BUSY)) == {"validity": "noisy", "foreign_cores": "1.25"}


def test_a_report_ends_with_the_details_of_each_arm_that_has_figures(result: PointResult) -> None:
    failed = replace(result.measured, failures={"reference": RuntimeError("x")})
    headings = [
        line
        for line in record.details(failed, ["prompt_lookup", "reference"]).splitlines()
        if line.startswith("## ")
    ]
    assert headings == [
        "## prompt_lookup: passes",
        "## prompt_lookup: as other tools define the same figures",
    ]
    assert "## reference: passes" in record.details(result.measured, ["reference"])


def test_a_figure_is_titled_with_the_setting(result: PointResult) -> None:
    target = result.point.config.model.target
    assert record.setting_line(result.point) == f"{target}, cpu, fp32, 1 thread, batch 1"


def stored(variant: str, **metrics: float) -> StoredRun:
    names = {"speedup": "speedup/decode_vs_plain", "ttft": "latency/ttft_ms.p50"}
    values = {names[key]: value for key, value in metrics.items()}
    tags = {
        "variant": variant,
        "equivalence": "exact",
        **({"verdict": "faster"} if "speedup" in metrics else {}),
    }
    return StoredRun("id", "name", "FINISHED", 0, tags, {}, values)


def test_a_sweeps_report_is_oldest_first_with_its_failures() -> None:
    newest_first = [stored("b", speedup=1.234), stored("a", ttft=12.0)]
    lines = sweep_report.report(newest_first, ["point 3 (strategy=x): out of memory"]).splitlines()
    assert cells(lines[0]) == [
        *("variant", "TTFT ms", "TPOT ms", "speed-up", "accepted", "verdict", "equivalence")
    ]
    assert len(cells(lines[1])) == len(cells(lines[0]))
    assert cells(lines[2]) == ["a", "12.00", "-", "-", "-", "-", "exact"]
    assert cells(lines[3]) == ["b", "-", "-", "1.23", "-", "faster", "exact"]
    assert lines[-1] == "* failed: point 3 (strategy=x): out of memory"


def test_the_step_curve_is_the_mean_gap_by_output_position() -> None:
    # The prefill commits one token; a step's position is that of its first token.
    one = timeline([1.0, 1.25, 1.75], [1, 3, 2])
    other = timeline([2.0, 2.5, 2.625, 2.75], [1, 1, 2, 1])
    assert record.step_curve([one, other]) == [(1, 375.0), (2, 125.0), (4, 312.5)]
    assert record.step_curve([]) == []
    assert record.step_curve([timeline([1.0])]) == []
