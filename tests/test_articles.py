"""What experiments of the articles share, and those that need no other: end to end on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from toy_clock import Clock
from toy_folders import repeating_prompts, save_model, save_prompts
from toy_traces import forward, step, trace

from experiments import run, tracking
from experiments.articles.dialogue import Turn
from experiments.articles.findings import Findings
from experiments.articles.fits import line_through
from experiments.articles.floor_lines import NO_OVERHEAD, agreement, floor_cells, floor_lines
from experiments.articles.lab import BEYOND_CONTEXT, OUT_OF_MEMORY, Floors, Lab, LimitError, along, limits
from experiments.articles.page import Heading, page
from experiments.articles.publish import limit_tag
from experiments.articles.steps import DecodedSteps, Step, few_steps_notes
from experiments.articles.study import ArticleOptions, command_of, refuse_unused
from experiments.articles.timing import Timing, repeated
from experiments.config import compose_run
from experiments.hardware import Hardware
from experiments.plots.curves import Line, Mark, Panel, curves
from experiments.plots.style import png
from experiments.point import prepare
from experiments.studies import all_articles, conversation, pass_curve
from experiments.studies.cache_on_off import CacheOnOffOptions, cost_of
from experiments.tracking import StoredRun
from specdec.types import Phase

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CONTEXT = 96


@dataclass(frozen=True)
class Place:
    root: Path

    def run(self, experiment: str, *arguments: str, needs_model: bool = True) -> int:
        model = [f"model.target={self.root / 'target'}", "dtype=fp32", "threads=1"] if needs_model else []
        return run.main([f"+experiment={experiment}", *model, *arguments])

    def prompts(self) -> list[str]:
        return ["workload=jsonl", f"workload.path={self.root / 'prompts.jsonl'}"]

    def runs(self, study: str) -> list[StoredRun]:
        return tracking.find_runs(tracking.open_store(self.root), study)

    def curve(self, stored: StoredRun, name: str) -> list[tuple[int, float]]:
        return tracking.read_curve(tracking.open_store(self.root), stored.run_id, name)

    def page(self, stored: StoredRun) -> str:
        return tracking.read_text(tracking.open_store(self.root), stored.run_id, "report.md")

    def plots(self, stored: StoredRun) -> set[str]:
        folders = self.root.glob(f"**/{stored.run_id}/artifacts/plots/*.png")
        return {path.name for path in folders}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("articles")
    save_model(root / "target", max_position_embeddings=CONTEXT)
    save_model(root / "long", max_position_embeddings=1024)
    save_model(root / "odd", hidden_size=12, num_attention_heads=2, num_key_value_heads=2)
    save_prompts(root / "prompts.jsonl", repeating_prompts((5, 7, 4, 6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        patch.setattr("experiments.hardware.LEAST_BUFFER_BYTES", 2**22)
        patch.setattr("experiments.hardware.CACHES_IN_BUFFER", 0)
        patch.setattr("experiments.hardware.MATRIX_SIZES", {"cpu": (64,)})
        patch.setattr("experiments.kernel_times.ROUNDS", 1)
        yield Place(root)


@pytest.fixture(scope="module")
def lab(place: Place) -> Lab:
    overrides = ["strategy=baseline", f"model.target={place.root / 'target'}", "dtype=fp32", "threads=1"]
    point = prepare(compose_run([*overrides, *place.prompts(), "workload.max_new_tokens=8"]))
    return Lab(point, Hardware(CPU, torch.float32, 1))


# --- timing


def advance(clock: Clock, seconds: float) -> None:
    clock.now += seconds


def test_a_time_is_the_median_without_the_first_and_what_undoes_it_is_not_timed() -> None:
    clock = Clock()
    durations_s = iter([9.0, 0.001, 0.005, 0.002])
    timing = repeated(
        lambda: advance(clock, next(durations_s)),
        CPU,
        lambda: advance(clock, 100.0),
        least=3,
        most=3,
        clock=clock,
    )
    assert timing.first_ms == pytest.approx(9000)
    assert (timing.count, timing.median_ms) == (3, pytest.approx(2))
    assert (timing.low_ms, timing.high_ms) == (pytest.approx(1.5), pytest.approx(3.5))
    assert timing.per(4) == pytest.approx(2000)
    assert str(timing) == "2 [1.5, 3.5]"


def test_slow_work_is_repeated_less_often() -> None:
    clock = Clock()
    slow = repeated(lambda: advance(clock, 1.0), CPU, budget_s=1.5, least=2, most=9, clock=clock)
    quick = repeated(lambda: advance(clock, 0.01), CPU, budget_s=1.5, least=2, most=9, clock=clock)
    assert (slow.count, quick.count) == (2, 9)


# --- the laboratory


def test_a_cache_beyond_the_context_or_the_memory_is_a_limit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, missing = along([CONTEXT, 8, CONTEXT + 1], "context", lambda size: lab.runner(1, size).lengths)
    assert set(found) == {8, CONTEXT}
    assert missing == {f"context {CONTEXT + 1}": BEYOND_CONTEXT}
    needed = lab.kv_bytes(4, 16)
    assert needed == lab.runner(4, 16).cache.store.allocated_bytes()
    monkeypatch.setattr(Lab, "free_bytes", needed)
    lab.runner(4, 16)
    with pytest.raises(LimitError, match=OUT_OF_MEMORY):
        lab.runner(5, 16)
    with pytest.raises(LimitError, match=OUT_OF_MEMORY):
        lab.decoder(5, 16)
    # One cache may serve a whole curve: a GPU is asked before, too, so that the rest of the curve is kept.
    with monkeypatch.context() as patch:
        patch.setattr(lab, "device", torch.device("cuda"))
        lab.check_fits(4, 16)
        with pytest.raises(LimitError, match=OUT_OF_MEMORY):
            lab.check_fits(5, 16)
    with pytest.raises(LimitError, match=f"context 999: {BEYOND_CONTEXT}"):
        along([999], "context", lambda size: lab.runner(1, size))


def test_a_model_that_memory_does_not_hold_is_a_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(weights: object) -> None:
        raise MemoryError

    monkeypatch.setattr(lab.point.pool, "target", convert)
    with pytest.raises(LimitError, match=OUT_OF_MEMORY):
        lab.runner(1, 8)


def test_running_out_of_memory_is_a_limit_and_another_fault_is_not() -> None:
    with pytest.raises(LimitError, match=OUT_OF_MEMORY), limits():
        raise MemoryError
    with pytest.raises(RuntimeError, match="else"), limits():
        raise RuntimeError("something else")


def test_a_timed_pass_leaves_the_cache_as_it_was(lab: Lab) -> None:
    runner = lab.filled(2, 9, 4)
    for tokens in (1, 4):
        assert lab.pass_on(runner, tokens, least=1, most=1).count == 1
        assert runner.lengths == (9, 9)


def test_requests_have_one_length_and_real_texts(lab: Lab) -> None:
    requests = lab.real_requests(6, 12, 3)
    assert [(len(one.prompt_ids), one.max_new_tokens) for one in requests] == [(12, 3)] * 6
    assert requests[0].prompt_ids[: -len(lab.point.requests[0].prompt_ids)] != ()


def test_an_overhead_that_is_not_known_is_no_overhead_of_0(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "overhead_ms", lambda *_: None)
    floors = {tokens: lab.varied().floors(1, tokens, 5) for tokens in (1, 2)}
    assert floors[1].with_overhead_ms is None
    assert pass_curve._floor_with_overhead(floors) == {}
    assert pass_curve._theory_note({}, floors) == NO_OVERHEAD
    known = Floors(3.0, 2.0, 1.5)
    assert known.with_overhead_ms == 4.5


def test_other_stores_stand_beside_the_own_one_which_is_first(lab: Lab) -> None:
    stores = lab.stores(["kv_int8", "dense", "kv_int4"])
    assert list(stores) == ["dense", "kv_int8", "kv_int4"]
    assert stores["dense"] is lab
    assert [one.arm.kv.name for one in stores.values()] == list(stores)


def test_floors_are_those_of_bytes_and_operations(lab: Lab) -> None:
    floors = lab.floors(2, 1, 10, kernels=True)
    cost, event = lab.cost_at(11), lab.event(2, 1, 10)
    assert floors.memory_ms == pytest.approx(1e-6 * cost.bytes_moved(event) / lab.ceilings.read_gb_s)
    assert floors.hardware_ms == max(floors.memory_ms, floors.compute_ms)
    assert floors.kernels_ms is not None
    assert floors.kernels_ms > 0
    varied = lab.varied(kv="kv_int8")
    assert (varied.arm.kv.name, lab.arm.kv.name) == ("kv_int8", "dense")


def test_steps_that_count_are_whole_and_of_all_rows() -> None:
    """Two rows: a prefill, two steps that settle, two that count, one cut by the limit, one of a single row."""
    counted = [Step(10, Phase.VERIFY, (3, 1)), Step(30, Phase.VERIFY, (1, 1))]
    steps = [
        Step(99, Phase.PREFILL, (1, 1)),
        Step(80, Phase.VERIFY, (1, 1)),
        Step(70, Phase.VERIFY, (1, 1)),
        *counted,
        Step(20, Phase.VERIFY, (1, 2), is_cut=True),
        Step(5, Phase.VERIFY, (4,)),
    ]
    found = DecodedSteps(steps, 2)
    assert found.settled == counted
    assert found.tok_s == 150
    assert (found.timing.median_ms, found.timing.first_ms, found.prefill_ms) == (20, 80, 99)
    assert DecodedSteps([steps[0], steps[5]], 2).settled == [steps[5]]
    (note,) = few_steps_notes({8: found})
    assert note.startswith("fewer than 3 steps counted at 8:")


def test_a_line_has_the_least_relative_errors() -> None:
    assert line_through({1: 15.0, 2: 25.0, 4: 45.0}) == pytest.approx((5.0, 10.0))
    assert line_through({8: 3.0}) == (3.0, 0.0)


# --- theory beside measurement


def test_a_prediction_is_called_off_where_it_is() -> None:
    timings = {1: Timing.of([10.0]), 2: Timing.of([20.0])}
    floors = {1: Floors(1, 2, 3, 9.0), 2: Floors(4, 1, 3, 14.0)}
    assert "0.70 to 0.90" in agreement(timings, floors)
    assert agreement(timings, floors).endswith("off by more than 25% at 2")
    close = agreement(timings, {1: floors[1]})
    assert close.endswith("close everywhere")
    assert floor_cells(floors[2]) == ["4.00", "14.0"]
    assert floor_cells(None) == ["-", "-"]
    assert [line.points for line in floor_lines(floors)] == [[(1, 2), (2, 4)], [(1, 9.0), (2, 14.0)]]
    assert len(floor_lines({1: Floors(1, 2, 3)})) == 1


# --- figures and pages


def test_theory_is_dashed_and_measurement_solid() -> None:
    lines = [
        Line("measured", [(1, 3), (2, 4)], spread=[(2, 3), (3, 5)]),
        Line("theory", [(1, 1), (2, 2)], is_theory=True),
    ]
    panels = [
        Panel(lines, "rows", "ms", marks=[Mark("here", (2, 4))]),
        Panel(lines[:1], "rows", "tok/s", log_x=False, log_y=False),
    ]
    figure = curves(panels, "a finding")
    assert figure is not None
    first, second = figure.axes
    styles = {line.get_linestyle(): line.get_marker() for line in first.get_lines()[:2]}
    assert styles == {"-": "o", "--": "None"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["measured", "theory"]
    assert (first.get_xscale(), second.get_xscale()) == ("log", "linear")
    assert (first.get_ylabel(), second.get_ylabel()) == ("ms", "tok/s")
    assert png(figure).startswith(b"\x89PNG")
    assert curves([Panel([Line("none", [])], "x", "y")], "nothing") is None


def test_a_page_has_the_finding_figures_tables_limits_and_the_command() -> None:
    figure = curves([Panel([Line("a", [(1, 1)])], "x", "y")], "t")
    found = Findings(
        "It is so",
        tables={"A table": [["a", "b"], ["1", "2"]]},
        figures={"one.png": figure, "none.png": None},
        notes=["a note"],
        limits={"batch 9": OUT_OF_MEMORY},
    )
    text = page(Heading("name", "A title", "here", "python -m x"), found, "plots", level=2)
    order = ["## A title", "It is so.", "![A title](plots/one.png)", "**A table**", "| 1 | 2 |", "* a note"]
    places = [text.index(part) for part in [*order, "* batch 9: out of memory", "Again: `python -m x`"]]
    assert places == sorted(places)
    assert "none.png" not in text


def test_a_limit_is_a_tag_whatever_it_is_of() -> None:
    assert limit_tag("KV kept, kv_int8, turn 2 (of 3)") == "limit.KV kept kv_int8 turn 2 of 3"


def test_a_command_says_what_is_not_by_default() -> None:
    options = CacheOnOffOptions(new_tokens=7)
    options.name = "cache_on_off"  # type: ignore[attr-defined]
    assert command_of(options, ["weights=int8", "a=[b,c]"]) == (
        "python -m experiments.run +experiment=cache_on_off experiment.new_tokens=7 weights=int8 'a=[b,c]'"
    )


def test_settings_that_play_no_part_are_refused() -> None:
    refuse_unused(["kv=kv_int8", "++model.target=x"], ["kv", "model"], "it")
    with pytest.raises(
        ValueError, match=r"^sampling.top_k=3: experiment=it doesn't depend on it; expected kv$"
    ):
        refuse_unused(["kv=kv_int8", "sampling.top_k=3"], ["kv"], "it")


def test_least_values_are_checked_one_by_one() -> None:
    @dataclass
    class Options(ArticleOptions):
        title: ClassVar[str] = ""
        sizes: tuple[int, ...] | list[int] = (1,)
        one: int = 1

        def measure(self, lab: Lab) -> Findings:
            raise NotImplementedError

    Options([1, 2], 3).check_at_least(sizes=1, one=3)
    for options, line in (
        (Options([2, 0]), r"experiment.sizes=\[2, 0\]: expected numbers of at least 1"),
        (Options([]), r"experiment.sizes=\[\]: expected numbers of at least 1"),
        (Options([1], 0), "experiment.one=0: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=line):
            options.check_at_least(sizes=1, one=1)


# --- experiments, end to end


def test_batch_curve_keeps_what_fits(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment.batches=[1,2,3]", "experiment.prompt_tokens=6", "experiment.new_tokens=5"]
    assert place.run("batch_curve", *arguments, *place.prompts(), "study=batch") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    (stored,) = (one for one in place.runs("batch") if one.tags["kind"] == "point")
    assert (stored.status, stored.tags["experiment"]) == ("FINISHED", "batch_curve")
    for name in ("curve_batch/step_ms", "curve_batch/tok_s"):
        assert [step for step, _ in place.curve(stored, name)] == [1, 2, 3]
    assert place.plots(stored) == {"batch_curve.png"}
    assert "+experiment=batch_curve" in place.page(stored)
    assert "plain / dense / autoregressive, cpu, fp32, 1 thread; " in place.page(stored)
    assert [stored.params[f"experiment.batches.{place}"] for place in range(3)] == ["1", "2", "3"]
    assert shown.out.count("kernels timed alone on cold weights") == 1


def test_batch_curves_of_two_strategies_overlay(place: Place) -> None:
    arguments = ["experiment.batches=[1,2]", "experiment.prompt_tokens=6", "experiment.new_tokens=8"]
    for strategy in ("baseline", "prompt_lookup"):
        status = place.run("batch_curve", *arguments, *place.prompts(), "study=two", f"strategy={strategy}")
        assert status == 0
    runs = [one for one in place.runs("two") if one.tags["kind"] == "point"]
    assert {one.tags["strategy"] for one in runs} == {"baseline", "prompt_lookup"}
    steps = [[step for step, _ in place.curve(one, "curve_batch/tok_s")] for one in runs]
    assert steps == [[1, 2], [1, 2]]
    # What kernels take for one token of each row says nothing of a step that verifies drafts.
    for one in runs:
        is_plain = one.tags["strategy"] == "baseline"
        assert ("kernels timed alone on cold weights" in place.page(one)) == is_plain
        assert ("by this machine's ceilings" in place.page(one)) == is_plain
        assert ("are not predicted" in place.page(one)) == (not is_plain)


def test_a_limit_is_a_recorded_point_and_the_rest_is_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "kv_bytes", lambda self, rows, capacity: rows)
    monkeypatch.setattr(Lab, "free_bytes", 2)
    arguments = ["experiment.batches=[2,1,3]", "experiment.prompt_tokens=6", "experiment.new_tokens=5"]
    assert place.run("batch_curve", *arguments, *place.prompts(), "study=limit") == 0
    (stored,) = (one for one in place.runs("limit") if one.tags["kind"] == "point")
    assert [step for step, _ in place.curve(stored, "curve_batch/step_ms")] == [1, 2]
    assert stored.tags["limit.batch 3"] == OUT_OF_MEMORY
    assert "* batch 3: out of memory" in place.page(stored)


def test_without_the_cache_a_step_reads_the_whole_text(place: Place) -> None:
    arguments = ["experiment.prompt_tokens=6", "experiment.new_tokens=9", "experiment.repeats=2"]
    assert place.run("cache_on_off", *arguments, *place.prompts(), "study=cache") == 0
    (stored,) = (one for one in place.runs("cache") if one.tags["kind"] == "point")
    read = place.curve(stored, "curve_cache/off_pass_tokens")
    assert read == [(position, 6 + position) for position in range(1, 9)]
    for name in ("trace/step_ms", "curve_cache/on_ms", "curve_cache/off_ms"):
        assert [step for step, _ in place.curve(stored, name)] == list(range(1, 9))
    text = place.page(stored)
    assert "| without | 8 | 84 | 84 |" in text
    assert "| with the cache | 8 | 8 | 8 |" in text
    assert "both wrote the same text" in text


def test_what_the_context_cuts_off_is_said(place: Place) -> None:
    arguments = [f"experiment.prompt_tokens={CONTEXT - 5}", "experiment.new_tokens=9", "experiment.repeats=1"]
    assert place.run("cache_on_off", *arguments, *place.prompts(), "study=cut") == 0
    (stored,) = (one for one in place.runs("cut") if one.tags["kind"] == "point")
    assert [step for step, _ in place.curve(stored, "curve_cache/off_ms")] == [1, 2, 3, 4]
    assert stored.tags["limit.write 9"] == BEYOND_CONTEXT
    assert place.page(stored).startswith("# With and without the KV cache\n\nWriting 5 tokens")


def test_costs_are_medians_by_position() -> None:
    repeats = ((1, 2), (3, 4), (2, 9))  # seconds of the steps behind the first
    traces = [
        trace(
            step(0, 8, "prefill", {0: [5]}),
            step(8, 8 + one, "decode", {0: [6]}),
            step(8 + one, 8 + one + two, "decode", {0: [7]}),
            passes=[forward("prefill", 8, 8 + one, (4,)), forward("prefill", 8 + one, 9 + one, (5,))],
        )
        for one, two in repeats
    ]
    assert cost_of(traces).ms == pytest.approx([2000, 4000])
    cost = cost_of(traces)
    assert (cost.total_ms, cost.tokens, cost.token_ids) == (7000, [4, 5], (5, 6, 7))


def test_a_conversation_kept_reads_what_is_new_and_says_the_same(place: Place) -> None:
    arguments = [
        "experiment.turns=3",
        "experiment.answer_tokens=4",
        "experiment.limit=8",
        "experiment.summary_tokens=3",
        "experiment.summary_every=2",
        "experiment.kv_formats=[kv_int8]",
    ]
    assert place.run("conversation", *arguments, *place.prompts(), "study=talk") == 0
    (stored,) = (one for one in place.runs("talk") if one.tags["kind"] == "point")
    kept, again, cut = (
        [value for _, value in place.curve(stored, f"curve_conversation/{name}_kv_mib")]
        for name in ("kv_kept", "read_again", "smaller_limit")
    )
    assert kept == again
    assert kept[0] < kept[1] < kept[2]
    assert max(cut) <= (8 + 3) / 11 * kept[-1]
    fewer = place.curve(stored, "curve_conversation/kv_kept_kv_int8_kv_mib")
    assert fewer[-1][1] < kept[-1]
    assert place.plots(stored) == {"conversation.png"}
    text = place.page(stored)
    assert "'KV kept' and 'read again' wrote the same 12 tokens" in text
    assert "a summary took " in text


def test_a_conversation_goes_as_far_as_it_fits(place: Place) -> None:
    arguments = ["experiment.turns=4", "experiment.answer_tokens=20", "experiment.limit=16"]
    more = ["experiment.summary_tokens=3", "experiment.summary_every=2", "experiment.kv_formats=[kv_int8]"]
    assert place.run("conversation", *arguments, *more, *place.prompts(), "study=long talk") == 0
    (stored,) = (one for one in place.runs("long talk") if one.tags["kind"] == "point")

    def turns(name: str) -> list[int]:
        return [turn for turn, _ in place.curve(stored, f"curve_conversation/{name}_ttft_ms")]

    # Prompts of 10, 14, 8 and 12 tokens, each with an answer of 20.
    assert turns("kv_kept") == turns("read_again") == turns("kv_kept_kv_int8") == [1, 2, 3]
    assert turns("start_afresh") == turns("smaller_limit") == [1, 2, 3, 4]
    for talk in ("KV kept", "read again", "KV kept kv_int8"):
        assert stored.tags[f"limit.{talk} turn 4"] == BEYOND_CONTEXT
    assert "In turn 3 of a conversation" in place.page(stored)


def test_a_turn_taken_several_times_is_one_with_medians() -> None:
    summaries = [Turn(3, 9, (ms,), (10,), 1.0, (5,)) for ms in (20, 40)]
    turns = [
        Turn(7, 9, (ms,), (5, ms), 1.0, (1, 2), summary)
        for ms, summary in zip((1, 3), summaries, strict=True)
    ]
    both = Turn.merged(turns)
    assert (both.ttfts_ms, both.ttft_ms, both.steps_ms) == ((1, 3), 2, (5, 1, 5, 3))
    assert both.total_ms == 2 + 14 / 2
    assert both.waited_ms == 2 + 30 + 10


def talked(ttft_ms: float, *steps_ms: float, answer: tuple[int, ...] = (1, 2), kv_mib: float = 1.0) -> Turn:
    return Turn(7, 9, (ttft_ms,), steps_ms, kv_mib, answer)


def test_who_waits_for_a_summary_waits_for_all_of_its_steps() -> None:
    summary = talked(10, 1, 2, 30)
    turn = Turn(7, 9, (100,), (5, 6), 1.0, (1, 2), summary)
    assert (turn.total_ms, summary.total_ms, turn.waited_ms) == (111, 43, 143)
    assert (turn.step.median_ms, turn.step.first_ms) == (6, 5)


def test_a_finding_of_conversations_follows_the_numbers() -> None:
    kept = [talked(10, 1), talked(10, 1), talked(10, 1)]
    again = [talked(10, 1), talked(25, 1, answer=(1, 3))]
    found = {conversation.KEPT: kept, conversation.AGAIN: again}
    assert conversation.headline_of(found) == (
        "In turn 2 of a conversation reading all 7 tokens again takes 2.5 times as long to the first token as reading "
        "the 7 new ones behind a cache of 1 MiB"
    )
    (note,) = conversation._text_notes(found)
    assert "wrote the same first 3 of 4 tokens" in note
    assert conversation.headline_of({"start afresh": kept}).endswith("only this fitted: start afresh")


def test_theory_needs_no_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("theory", "study=theory", needs_model=False) == 0
    (stored,) = place.runs("theory")
    assert (stored.status, stored.tags["kind"]) == ("FINISHED", "report")
    assert "The articles' arithmetic, published and computed" in place.page(stored)
    assert place.plots(stored) == {"theory.png"}
    # The ridge is at 125.4 tokens: a pass over 125 still waits for memory.
    assert "for arithmetic over 126 and more" in capsys.readouterr().out
    assert "worked back from published times (assumed)" in place.page(stored)


def test_all_articles_are_runs_of_their_own_and_one_page(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: CacheOnOffOptions, lab: Lab) -> Findings:
        raise RuntimeError("a fault")

    monkeypatch.setattr(CacheOnOffOptions, "measure", broken)
    folder = tmp_path / "page"
    status = place.run(
        "all_articles",
        "experiment.experiments=[theory,cache_on_off]",
        f"model.target={place.root / 'long'}",
        f"experiment.folder={folder}",
        "study=all",
    )
    assert status != 0
    runs = {one.name: one for one in place.runs("all") if one.tags["kind"] != "ceilings"}
    assert runs["theory"].status == "FINISHED"
    assert runs["cache_on_off baseline"].status == "FAILED"
    text = place.page(runs["all articles"])
    assert "* cache_on_off failed: RuntimeError: a fault" in text
    assert "## Theory: what a pass must cost" in text
    assert (folder / "README.md").read_text() == text
    assert (folder / "plots" / "theory.png").read_bytes()
    assert "cache_on_off failed" in capsys.readouterr().out


def test_sections_of_the_one_page_are_told_apart() -> None:
    titles = [
        getattr(all_articles.plugins.default_options("experiment", name), "title", name)
        for name in all_articles.ALL
    ]
    assert len(set(map(all_articles._anchor, titles))) == len(all_articles.ALL)
    assert all_articles._anchor("Theory: what a pass must cost") == "theory-what-a-pass-must-cost"


def test_a_store_that_cannot_hold_the_heads_is_refused_before_anything_is_measured(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = f"model.target={place.root / 'odd'}"  # heads of 6 numbers: 2 bits each are no whole bytes
    for experiment, option, more in (
        ("context_curve", "kv", []),
        ("batch_capacity", "kv", []),
        ("conversation", "kv_formats", place.prompts()),
    ):
        assert place.run(experiment, odd, f"experiment.{option}=[kv_int2]", *more, "study=odd") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"experiment.{option}=[kv_int2]: heads of 6 numbers" in line
    assert place.runs("odd") == []


@pytest.mark.parametrize(
    ("experiment", "argument", "words"),
    [
        ("batch_curve", "experiment.batches=[0]", "numbers of at least 1"),
        ("batch_curve", "measure.ceilings=skip", "needs them"),
        ("cache_on_off", "strategy=specdec", "takes no part"),
        ("cache_on_off", "batch_size=2", "doesn't depend on it"),
        ("batch_curve", "sampling.stop=[a]", "go on to their length; expected none of sampling.stop, "),
        ("read_vs_write", "sampling.ignore_eos=true", "go on to their length"),
        (
            "cache_on_off",
            "strategy=no_cache",
            "decoding=no_cache: experiment=cache_on_off times passes over a cache",
        ),
        ("batch_curve", "workload.max_new_tokens=9", "is its own option"),
        ("conversation", "experiment.kv_formats=[kv_int3]", "unknown kv 'kv_int3'"),
        ("theory", "weights=int8", "doesn't depend on it; expected study"),
        ("all_articles", "experiment.experiments=[quant_grid]", "it has no page"),
        ("all_articles", "experiment.experiments=[nosuch]", "unknown experiment 'nosuch'"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_logged(
    place: Place, experiment: str, argument: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.run(experiment, argument, "study=bad", needs_model=experiment != "theory") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert place.runs("bad") == []
