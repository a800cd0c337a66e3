"""Reading against writing, one request, shapes, phases, the trade-off and chunked prefill: end to end, and by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
import torch
from toy_folders import repeating_prompts, save_model, save_prompts
from toy_models import random_prompts, tiny_model
from toy_traces import forward, step, trace

from experiments import hardware, run, tracking
from experiments.articles.anatomy import Anatomy
from experiments.articles.interleaving import Arrival, Arrivals, one_arrival
from experiments.articles.lab import Lab
from experiments.articles.request_law import RequestLaw, Shape
from experiments.articles.steps import Step
from experiments.articles.timing import Timing
from experiments.studies import chunked_prefill, phases_and_batching
from experiments.studies.latency_throughput import knee_of
from experiments.studies.phases_and_batching import Phases
from experiments.studies.read_vs_write import Comparison, doublings, written
from experiments.tracking import Store, StoredRun
from specdec import ModelRunner
from specdec.types import Phase

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 512


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("requests")
    save_model(root / "target", max_position_embeddings=CONTEXT)
    save_prompts(root / "prompts.jsonl", repeating_prompts((6, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        # What a machine can do takes seconds to measure, and is not what is tested here.
        patch.setattr(hardware, "read_gb_s", lambda device: 10.0)
        patch.setattr(hardware, "gemm_gflop_s", lambda device, dtype: 100.0)
        yield root


def run_preset(root: Path, name: str, *more: str) -> int:
    return run.main(
        [f"+experiment={name}", f"model.target={root / 'target'}", "dtype=fp32", "threads=1", *more]
    )


def logged(root: Path, study: str) -> tuple[Store, StoredRun]:
    """The one run of a study, beside those of the ceilings."""
    store = tracking.open_store(root)
    (found,) = (one for one in tracking.find_runs(store, study) if one.tags["kind"] != "ceilings")
    return store, found


def curves(root: Path, name: str, *more: str, figures: tuple[str, ...] = ()) -> Mapping[str, list[int]]:
    """Run a preset as a study of its own: the steps of its curves, once page and figures were found there."""
    study = f"{name} {len(more)}"
    assert run_preset(root, name, f"study={study}", *more) == 0
    store, found = logged(root, study)
    assert found.status == "FINISHED"
    text = tracking.read_text(store, found.run_id, "report.md")
    assert f"+experiment={name}" in text
    files = {artifact.path for artifact in store.client.list_artifacts(found.run_id, "plots")}
    for figure in figures or (f"{name}.png",):
        assert f"plots/{figure}" in files
        assert f"(plots/{figure})" in text
    names = [metric for metric in found.metrics if metric.startswith(("curve_", "trace/"))]
    read = {metric: tracking.read_curve(store, found.run_id, metric) for metric in names}
    assert all(value > 0 for points in read.values() for _, value in points)
    return {metric: [step for step, _ in points] for metric, points in read.items()}


# --- read_vs_write


def test_reading_and_writing_end_to_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = curves(root, "read_vs_write", "experiment.prompt_tokens=40", "experiment.new_tokens=12")
    assert found["curve_prefill/ms"] == found["curve_prefill/tok_s"] == [20, 40]
    assert found["trace/step_ms"] == list(range(2, 14))
    shown = capsys.readouterr().out
    assert "Reading 40 tokens takes" in shown
    assert "the weights are read 1 time(s) for reading, 12 times for writing" in shown
    assert "One plain step behind 46 tokens, its kernels timed alone" in shown


def test_what_is_beyond_the_context_is_said_and_the_rest_kept(root: Path) -> None:
    more = (
        f"experiment.prompt_tokens={CONTEXT + 88}",
        f"experiment.new_tokens={CONTEXT}",
        "prefill_chunk=64",
    )
    found = curves(root, "read_vs_write", *more)
    assert found["curve_prefill/ms"] == [18, 37, 75, 150, 300]
    # One token before them, and the first of them is the prefill's.
    assert found["trace/step_ms"] == list(range(2, CONTEXT))
    _, logged_run = logged(root, "read_vs_write 3")
    assert logged_run.tags[f"limit.read {CONTEXT + 88}"] == "beyond context"
    assert logged_run.tags[f"limit.write {CONTEXT}"] == "beyond context"


def test_a_comparison_by_hand() -> None:
    found = Comparison(100, Timing(50, 40, 60, 9, 80), [(10, 1), (30, 3), (20, 1)])
    assert (found.num_steps, found.num_written, found.write_ms) == (3, 5, 60)
    assert found.ratio == 1.2
    # 2000 tokens a second read, 83.3 written.
    assert found.rate_ratio == pytest.approx(24)
    assert found.positions_ms == [(2, 10), (5, 30), (6, 20)]
    assert found.headline == "Reading 100 tokens takes 50 ms, writing 5 takes 0.06 s: 1.2 times as long"


def test_what_the_prefill_wrote_is_not_counted_as_written() -> None:
    steps = [Step(90, Phase.PREFILL, (1,)), Step(10, Phase.DECODE, (1,)), Step(12, Phase.VERIFY, (4,))]
    assert written(steps) == [(10, 1), (12, 4)]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(512, [16, 32, 64, 128, 256, 512]), (100, [25, 50, 100]), (31, [31]), (1, [1])],
)
def test_lengths_that_are_read(most: int, expected: list[int]) -> None:
    assert doublings(most) == expected


# --- request_anatomy


@pytest.mark.parametrize("strategy", ["baseline", "prompt_lookup"])
def test_one_question_end_to_end(root: Path, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    more = [
        f"strategy={strategy}",
        "experiment.question='w1 w2 w3 w1 w2 w3 w1'",
        "experiment.new_tokens=10",
        "experiment.repeats=2",
    ]
    figures = ("request_anatomy.png", "request_timeline.png")
    more += [] if strategy == "baseline" else ["draft_length.max=3"]
    positions = curves(root, "request_anatomy", *more, figures=figures)["trace/step_ms"]
    assert positions[0] == 1
    assert positions == sorted(set(positions))
    assert positions[-1] <= 10
    if strategy == "baseline":
        assert positions == list(range(1, len(positions) + 1))
    _, found = logged(root, f"request_anatomy {len(more)}")
    # What the sum leaves out is closing the request; an outer clock is never behind it.
    assert 0 <= found.metrics["latency/identity_error_pct.max"] < 100
    shown = capsys.readouterr().out
    assert "Reading the question, 7 tokens at once" in shown
    assert "asked: 'w1 w2 w3 w1 w2 w3 w1'" in shown


def test_a_question_read_in_chunks_was_not_read_at_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("experiment.question='w1 w2 w3 w1 w2 w3 w1'", "experiment.new_tokens=3", "experiment.repeats=1")
    assert run_preset(root, "request_anatomy", "study=chunks", "prefill_chunk=4", *more) == 0
    assert "Reading the question, 7 tokens in 2 passes, took" in capsys.readouterr().out


def test_a_question_beyond_the_context_leaves_a_failed_run(root: Path) -> None:
    question = " ".join(["w1"] * CONTEXT)
    assert run_preset(root, "request_anatomy", "study=too long", f"experiment.question='{question}'") != 0
    _, found = logged(root, "too long")
    assert found.status == "FAILED"
    assert "beyond context" in found.tags["error"]


def test_a_request_by_hand() -> None:
    """The prefill takes 3 s, steps 1 s and 2 s, of which the second brings two tokens; 0.5 s pass before it is over."""
    steps = (
        step(0, 3, "prefill", {0: [5]}),
        step(3, 4, "verify", {0: [6]}),
        step(4, 6, "verify", {0: [7, 8]}),
    )
    passes = (forward("prefill", 0, 3, (9,)), forward("draft", 3, 3.5), forward("verify", 3.5, 4, (4,)))
    found = Anatomy(trace(*steps, passes=passes), 6500.0)
    assert found.metrics.ttft_ms == 3000
    assert found.later_tokens == 3
    assert found.metrics.tpot_ms == 1000
    assert found.sum_ms == 6000
    assert found.error_frac == pytest.approx(-0.5 / 6.5)
    assert found.positions_ms == [(1, 3000), (2, 1000), (4, 2000)]
    assert found.target_passes == [[passes[0]], [passes[2]], []]


# --- workload_shapes


def test_shapes_end_to_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = curves(
        root,
        "workload_shapes",
        "experiment.chat=[4,12]",
        "experiment.document=[40,3]",
        "experiment.prompts=[8,16,32,600]",
        "experiment.contexts=[8,32,600]",
        "experiment.repeats=1",
        figures=("workload_shapes.png", "request_law.png"),
    )
    assert found["curve_prefill/ms"] == found["curve_prefill/tok_s"] == [8, 16, 32]
    assert found["curve_context/step_ms"] == [8, 32]
    _, logged_run = logged(root, "workload_shapes 5")
    for shape in ("chat", "document"):
        for what in ("total_s", "prefill_frac", "predicted_total_s", "predicted_prefill_frac"):
            assert logged_run.metrics[f"workload_shapes/{shape}_{what}"] > 0
    assert "workload_shapes/inverted_total_s" not in logged_run.metrics
    assert logged_run.metrics["workload_shapes/inverted_predicted_total_s"] > 0
    limits = {tag: text for tag, text in logged_run.tags.items() if tag.startswith("limit.")}
    assert limits["limit.read 600"] == limits["limit.context 600"] == "beyond context"
    assert limits["limit.inverted"] == "beyond context"
    assert len(limits) == 3
    assert "for inverted (predicted)" in capsys.readouterr().out


def test_what_would_take_too_long_is_predicted_only(root: Path) -> None:
    lengths = ("experiment.chat=[4,12]", "experiment.document=[40,3]", "experiment.inverted=[50,2]")
    timed = ("experiment.prompts=[8,16,32]", "experiment.contexts=[8]")
    curves(
        root,
        "workload_shapes",
        *lengths,
        *timed,
        "experiment.most_seconds=0",
        "seed=1",
        figures=("request_law.png",),
    )
    _, found = logged(root, "workload_shapes 7")
    assert "workload_shapes/chat_total_s" not in found.metrics
    assert "experiment.most_seconds is 0" in found.tags["limit.chat"]
    assert found.metrics["workload_shapes/chat_predicted_total_s"] > 0


def timings(times_ms: Mapping[int, float]) -> dict[int, Timing]:
    return {at: Timing(ms, ms, ms, 9, ms) for at, ms in times_ms.items()}


def test_a_prediction_by_hand() -> None:
    """Reading n tokens takes 5 + 0.5 n + 0.01 n^2 ms, a step 20 + 0.1 n ms."""
    reads = timings({n: 5 + 0.5 * n + 0.01 * n**2 for n in (10, 20, 40, 80)})
    law = RequestLaw.fitted(reads, timings({n: 20 + 0.1 * n for n in (10, 50, 90)}))
    found = law.predict(Shape("document", 100, 11))
    assert found.prefill_s == pytest.approx(0.155)
    # Steps behind 100, 101, ... 109 tokens, on average 104.5.
    assert found.decode_s == pytest.approx(10 * (20 + 0.1 * 104.5) / 1e3)
    assert found.prefill_frac == pytest.approx(0.155 / 0.4595)
    assert law.predict(Shape("one", 100, 1)).decode_s == 0


@pytest.mark.parametrize("steps_ms", [{64: 20.0}, {64: 22.0, 512: 18.0}])
def test_steps_that_show_no_growth_are_taken_as_constant(steps_ms: dict[int, float]) -> None:
    law = RequestLaw.fitted(timings({1: 1, 2: 2, 3: 3}), timings(steps_ms))
    assert law.step_ms(100_000) == 20


# --- phases_and_batching


def test_phases_end_to_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = curves(root, "phases_and_batching", "experiment.batches=[1,2,4]", "experiment.prompt_tokens=8")
    names = ("step_ms", "tok_s", "prefill_ms", "prefill_tok_s", "prefill_joint_tok_s")
    assert found == {f"curve_batch/{name}": [1, 2, 4] for name in names}
    assert "this engine reads prompts row by row" in capsys.readouterr().out


def test_a_joint_pass_reads_what_rows_alone_read() -> None:
    """What is timed as one joint prefill is one: the same logits, the same cache."""
    model = tiny_model("llama")
    prompts = random_prompts([9, 9, 9])
    alone, jointly = ModelRunner(model, 3, 12), ModelRunner(model, 3, 12)
    torch.testing.assert_close(
        jointly.decode(torch.tensor(prompts)), alone.prefill(prompts, range(3)), rtol=0, atol=1e-12
    )
    assert jointly.lengths == alone.lengths == (9, 9, 9)


def phases(batch: int, each_ms: float, step_ms: float) -> Phases:
    each, one_step = (Timing(ms, ms, ms, 9, ms) for ms in (each_ms, step_ms))
    joint = Timing(0.8 * each_ms, 0, 0, 9, 0) if batch == 8 else each
    return Phases(batch, 100, each, joint, one_step)


def test_what_a_batch_brings_to_each_phase() -> None:
    found = {1: phases(1, 50, 20), 4: phases(4, 200, 20), 8: phases(8, 320, 80)}
    assert found[8].each_tok_s == 2500
    assert found[4].step_tok_s == 200
    assert phases_and_batching._gains(found) == {"prefill": 1.25, "prefill_joint": 1.5625, "decode": 2}
    assert phases_and_batching._headline(found) == (
        "From 1 to 8 rows writing brings 2.00 times the tokens a second, reading in one joint pass 1.56 times"
    )
    flat = {1: found[1], 4: found[4]}
    assert phases_and_batching._headline(flat).endswith(
        "writing brings 4.0 times the tokens a second, reading in one joint pass nothing (1.00 times)"
    )


# --- latency_throughput


def test_the_trade_off_end_to_end_keeps_what_fits_into_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 layers x (key, value) x 2 heads x 8 x 4 bytes for each of 6 + 8 tokens and a spare one, times 2 rows
    monkeypatch.setattr(Lab, "free_bytes", 2 * 2 * 2 * 2 * 8 * 4 * 15)
    found = curves(
        root,
        "latency_throughput",
        "experiment.batches=[1,2,4]",
        "experiment.prompt_tokens=6",
        "experiment.new_tokens=8",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
    )
    for name in ("step_ms", "tok_s", "tok_s_request"):
        assert found[f"curve_batch/{name}"] == [1, 2]
    _, logged_run = logged(root, "latency_throughput 5")
    assert logged_run.tags["limit.batch 4"] == "out of memory"


def test_the_knee_is_farthest_below_the_chord() -> None:
    points = {1: (10.0, 10.0), 2: (20.0, 10.0), 4: (40.0, 11.0), 8: (50.0, 20.0), 16: (55.0, 40.0)}
    assert knee_of(points) == 4
    # What is worse in both is no part of the curve: without it the chord ends at 16 rows.
    assert knee_of(points | {32: (54.0, 90.0)}) == 4


@pytest.mark.parametrize(
    "points",
    [
        {1: (10.0, 10.0), 2: (20.0, 20.0), 4: (30.0, 30.0)},
        {1: (10.0, 10.0), 2: (20.0, 11.0)},
        {1: (30.0, 10.0), 2: (20.0, 30.0), 4: (10.0, 80.0)},
        {1: (10.0, 10.0), 2: (20.0, 10.0), 4: (40.0, 10.0)},
    ],
)
def test_a_straight_or_short_curve_has_no_knee(points: dict[int, tuple[float, float]]) -> None:
    assert knee_of(points) is None


# --- chunked_prefill


def test_chunked_prefill_end_to_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = curves(
        root,
        "chunked_prefill",
        "experiment.prompt_tokens=24",
        "experiment.chunks=[1,8,16,100]",
        "experiment.rows=2",
        f"experiment.context={CONTEXT - 10}",
        "experiment.repeats=1",
    )
    # Chunks of 1 need 25 steps of rows that have room for 10; what is larger than the prompt is the prompt.
    for name in ("ttft_ms", "step_gap_ms.max", "step_gap_ms.p50"):
        assert found[f"curve_chunk/{name}"] == [8, 16, 24]
    _, logged_run = logged(root, "chunked_prefill 5")
    assert logged_run.tags["limit.chunk 1"] == "beyond context"
    assert "a prompt of 24 tokens makes others wait" in capsys.readouterr().out


def test_chunks_and_steps_take_turns() -> None:
    """On a clock that moves by one second whenever it is read; tokens are those of each row alone."""
    texts, prompt = random_prompts([5, 5]), random_prompts([7], seed=3)[0]
    model = tiny_model("llama")
    runner = ModelRunner(model, 3, 12)
    newest = runner.prefill(texts, [0, 1]).argmax(-1).tolist()
    ticks = count()
    found = one_arrival(runner, prompt, 3, newest, lambda: float(next(ticks)))
    # Read at 0 on arrival, then after each of three chunks and three steps.
    assert found == Arrival(ttft_ms=5000, reading_ms=3000, gaps_ms=(2000, 2000, 2000))
    assert runner.lengths == (8, 8, 8)
    alone = ModelRunner(model, 1, 12)
    expected = alone.prefill([prompt], [0]).argmax(-1)
    following = runner.decode(torch.tensor([[0], [0], [1]]))[2]
    alone.decode(expected[:, None])
    torch.testing.assert_close(following, alone.decode(torch.tensor([[1]]))[0], rtol=0, atol=1e-12)


def arrived(ttft_ms: float, *gaps_ms: float) -> Arrivals:
    return Arrivals([Arrival(ttft_ms, ttft_ms, gaps_ms)], [10.0], ttft_ms)


def test_gaps_of_repeats_are_medians_and_have_a_percentile_when_many() -> None:
    runs = [Arrival(90, 60, (30, 50)), Arrival(100, 70, (20, 40)), Arrival(300, 80, (20, 200))]
    found = Arrivals(runs, [9, 10, 30], 500)
    assert (found.num_chunks, found.ttft_ms, found.reading_ms) == (2, 100, 70)
    assert (found.longest_gap_ms, found.median_gap_ms, found.idle_gap_ms) == (50, 35, 10)
    assert found.p99_gap_ms is None
    assert arrived(1, *range(101)).p99_gap_ms == 99


def test_the_headline_follows_the_numbers() -> None:
    found = {32: arrived(300, 40), 64: arrived(150, 50), 128: arrived(100, 100)}
    assert chunked_prefill.balanced(found) == 64
    assert chunked_prefill._headline(found, 128) == (
        "In chunks of 64, a prompt of 128 tokens makes others wait 50 ms at most (0.50 of what it does whole), "
        "for 1.50 times the time to its first token"
    )
    found = {64: arrived(250, 90), 128: arrived(100, 100)}
    assert chunked_prefill._headline(found, 128).startswith("Read whole, a prompt of 128 tokens makes others")
    # Nothing is said of what was not tried.
    assert chunked_prefill._headline({128: found[128]}, 128).endswith("makes others wait 100 ms")


# --- what is refused


@pytest.mark.parametrize(
    ("name", "override", "mentions"),
    [
        ("read_vs_write", "experiment.new_tokens=1", "experiment.new_tokens=1: expected at least 2"),
        ("request_anatomy", "experiment.question=' '", "experiment.question=' '"),
        (
            "workload_shapes",
            "experiment.chat=[4]",
            "experiment.chat=[4]: expected tokens of prompt and answer",
        ),
        ("workload_shapes", "experiment.prompts=[4,4,8]", "expected at least 3 lengths"),
        ("workload_shapes", "strategy=prompt_lookup", "strategy=prompt_lookup"),
        ("phases_and_batching", "prefill_chunk=4", "prefill_chunk=4"),
        (
            "latency_throughput",
            "experiment.batches=[]",
            "experiment.batches=[]: expected numbers of at least 1",
        ),
        ("chunked_prefill", "experiment.chunks=[8,0]", "experiment.chunks=[8, 0]"),
    ],
)
def test_bad_input_is_one_clear_line(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, override: str, mentions: str
) -> None:
    assert run_preset(root, name, "study=bad", override) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions in line
    assert tracking.find_runs(tracking.open_store(root), "bad") == []
