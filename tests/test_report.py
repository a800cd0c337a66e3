"""What a person reads: the plan, the table, the notes; and the record's tags that repeat them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import record, report, sweep_report
from experiments.config import compose_run
from experiments.equivalence import DIVERGED, EXACT, NEAR_TIE, Comparison
from experiments.point import PointResult, measure_point, prepare
from experiments.statistics import Ratio
from experiments.strategy import arms_of
from experiments.tracking import StoredRun

pytestmark = pytest.mark.usefixtures("one_thread")


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
    ]
    return measure_point(prepare(compose_run(overrides)))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_plan_names_everything_that_is_about_to_run(result: PointResult) -> None:
    text = "\n".join(report.plan_lines(result.point))
    for part in (
        "prompt_lookup(min_ngram=1, max_ngram=3)",
        "fixed(max=4)",
        "reference",
        str(result.point.config.model.target),
        "cpu, fp32, 1 threads",
        "3 prompts of 6 to 12 tokens, 20 new tokens, batch 1, 1 x, seed 7",
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
    sizes = {"a": replace(result.footprints["reference"], weights_bytes=3 * 2**20, kv_bytes_per_token=23040)}
    (line,) = report.footprint_lines(sizes)
    assert "a: weights 3 MiB" in line
    assert "23,040 bytes per token" in line


def test_a_variant_is_the_resolved_parts() -> None:
    one = arms_of(compose_run(["strategy=prompt_lookup"])).strategy
    other = arms_of(compose_run(["strategy=prompt_lookup", "draft_length.max=6"])).strategy
    assert report.variant(one) == (
        "plain / dense / speculative / prompt_lookup(min_ngram=1, max_ngram=3) / token / fixed(max=4)"
    )
    assert report.variant(other) == report.variant(one).replace("max=4", "max=6")
    assert report.variant(arms_of(compose_run(["strategy=baseline"])).strategy) == (
        "plain / dense / autoregressive"
    )


def test_the_table_has_a_column_per_arm_and_the_metrics_own_values(result: PointResult) -> None:
    heading, rule, *rows = report.markdown_table(result).splitlines()
    assert cells(heading)[1:] == ["prompt_lookup", "reference"]
    assert cells(rule) == ["---", "---:", "---:"]
    table = {cells(row)[0]: cells(row)[1:] for row in rows}
    ours = result.metrics
    theirs = result.metrics_of(result.point.arms.plain)
    assert table["TTFT, median ms"] == [f"{m['latency/ttft_ms.p50']:.1f}" for m in (ours, theirs)]
    assert table["tokens per target pass"] == [f"{ours['spec/tokens_per_pass']:.2f}", "1.00"]
    assert table["output against its twin"] == ["exact", "-"]
    low, high = ours["speedup/decode_vs_plain.ci_low"], ours["speedup/decode_vs_plain.ci_high"]
    assert table["decode speed-up [95 % interval]"] == [
        f"{ours['speedup/decode_vs_plain']:.2f}x [{low:.2f}, {high:.2f}]",
        "-",
    ]


def test_the_console_shows_the_same_table(result: PointResult) -> None:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(report.console_table(result))
    shown = captured.get()
    for row in report.markdown_table(result).splitlines()[2:]:
        assert cells(row)[0] in shown
        assert cells(row)[1] in shown


def test_a_ratio_without_an_interval_shows_none(result: PointResult, monkeypatch: pytest.MonkeyPatch) -> None:
    single = replace(result)
    monkeypatch.setattr(
        type(single), "speedups", {"decode_vs_plain": Ratio(1.5, None, None, 1)}, raising=True
    )
    assert "| 1.50x | - |" in report.markdown_table(single)
    monkeypatch.setattr(type(single), "speedups", {"decode_vs_plain": None}, raising=True)
    assert "| decode speed-up [95 % interval] | - | - |" in report.markdown_table(single)


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


# --- tags and the report of a sweep


def test_tags_say_what_was_run(result: PointResult) -> None:
    tags = record.tags_before(result.point, "abc")
    assert tags["variant"] == report.variant(result.point.arms.strategy)
    assert (tags["kind"], tags["strategy"], tags["sweep_id"]) == ("point", "prompt_lookup", "abc")
    assert (tags["drafter"], tags["verifier"], tags["draft_length"]) == ("prompt_lookup", "token", "fixed")
    assert tags["draft"] == "none"
    assert "sweep_id" not in record.tags_before(result.point, None)
    assert all(isinstance(value, str) for value in tags.values())


def stored(variant: str, **metrics: float) -> StoredRun:
    names = {"speedup": "speedup/decode_vs_plain", "ttft": "latency/ttft_ms.p50"}
    values = {names[key]: value for key, value in metrics.items()}
    return StoredRun("id", "name", "FINISHED", 0, {"variant": variant, "equivalence": "exact"}, {}, values)


def test_a_sweeps_report_is_oldest_first_with_its_failures() -> None:
    newest_first = [stored("b", speedup=1.234), stored("a", ttft=12.0)]
    lines = sweep_report.report(newest_first, ["point 3 (strategy=x): out of memory"]).splitlines()
    assert cells(lines[0]) == ["variant", "TTFT ms", "TPOT ms", "speed-up", "accepted", "equivalence"]
    assert len(cells(lines[1])) == len(cells(lines[0]))
    assert cells(lines[2]) == ["a", "12.00", "-", "-", "-", "exact"]
    assert cells(lines[3]) == ["b", "-", "-", "1.23", "-", "exact"]
    assert lines[-1] == "* failed: point 3 (strategy=x): out of memory"


def test_the_step_curve_is_by_output_position(result: PointResult) -> None:
    curve = record._step_curve(result)
    positions = [position for position, _ in curve]
    assert positions[0] == 1
    assert positions == sorted(set(positions))
    assert all(step_ms > 0 for _, step_ms in curve)
