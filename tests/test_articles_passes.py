"""The articles' experiments that time passes, end to end on a tiny model, and their arithmetic on made-up numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_folders import save_model

from experiments import hardware, run, tracking
from experiments.articles import floor_lines, utilization
from experiments.articles.kinds import DECODE, PREFILL, Kind, MeasuredKind
from experiments.articles.lab import Floors, Lab
from experiments.articles.resident import tensors_in
from experiments.articles.timing import Timing
from experiments.articles.utilization import Utilization
from experiments.roofline import Ceilings, ModelCost
from experiments.studies import (
    batch_capacity,
    context_curve,
    pass_curve,
    prefill_curve,
    quantized_decode,
    roofline,
)
from experiments.studies.batch_capacity import Capacity, Memory
from experiments.studies.context_curve import ContextStep
from experiments.studies.quantized_decode import FormatStep, OriginLine
from experiments.theory import PrefillCurve
from experiments.trace import PassEvent
from experiments.tracking import StoredRun

pytestmark = pytest.mark.usefixtures("one_thread", "quick")
CONTEXT = 128  # of the tiny model
MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("passes")
    save_model(root / "target", hidden_size=64, intermediate_size=64, num_attention_heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        yield root


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of a small buffer and small products: no time matters here."""
    monkeypatch.setattr(hardware, "LEAST_BUFFER_BYTES", 4 * MIB)
    monkeypatch.setattr(hardware, "CACHES_IN_BUFFER", 0)
    monkeypatch.setattr(hardware, "MATRIX_SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(hardware, "OVERHEAD_PASSES", 2)


def arguments(root: Path, name: str, *more: str) -> list[str]:
    return [
        f"+experiment={name}",
        f"model.target={root / 'target'}",
        "threads=1",
        "dtype=fp32",
        f"study={name}",
        *more,
    ]


def finished(root: Path, name: str, *more: str) -> tuple[StoredRun, str]:
    """The one run that such a command logs, and its page."""
    assert run.main(arguments(root, name, *more)) == 0
    store = tracking.open_store(root)
    (found,) = (one for one in tracking.find_runs(store, name) if one.tags.get("experiment") == name)
    assert found.status == "FINISHED"
    page = tracking.read_text(store, found.run_id, "report.md")
    assert f"](plots/{name}.png)" in page
    assert [one.path for one in store.client.list_artifacts(found.run_id, "plots")] == [f"plots/{name}.png"]
    return found, page


def steps(root: Path, found: StoredRun, curve: str) -> list[int]:
    points = tracking.read_curve(tracking.open_store(root), found.run_id, curve)
    assert all(value > 0 for _, value in points)
    return [step for step, _ in points]


def timed(median_ms: float) -> Timing:
    return Timing(median_ms, median_ms, median_ms, 3, median_ms)


# --- prefill_curve


def test_a_prefill_curve_keeps_what_it_has_at_the_end_of_the_context(root: Path) -> None:
    found, page = finished(root, "prefill_curve", "experiment.tokens=[64,4,16,200]")
    for curve in ("curve_prefill/ms", "curve_prefill/tok_s"):
        assert steps(root, found, curve) == [4, 16, 64]
    assert found.tags["limit.prompt 200"] == "beyond context"
    assert "prompt 200: beyond context" in page
    assert 0 <= found.metrics["curve_prefill/quadratic_frac"] <= 1


def test_a_prefill_finding_follows_the_numbers() -> None:
    slower = {10: timed(10.0), 20: timed(10.0), 40: timed(80.0)}
    assert prefill_curve.rates(slower) == {10: 1000.0, 20: 2000.0, 40: 500.0}
    assert prefill_curve.dips(slower) == [40]
    fit = PrefillCurve(fixed_s=0.0, linear_s=1.0, quadratic_s=0.025)
    said = prefill_curve.headline(slower, fit)
    assert "20 tokens are read fastest, at 2,000 tokens" in said
    assert "those of 40 at 25% of that" in said
    assert said.endswith("a fitted quadratic part takes 50% of 40 tokens' time")
    faster = {10: timed(10.0), 20: timed(15.0)}
    assert prefill_curve.dips(faster) == []
    assert prefill_curve.fitted(faster) is None
    assert prefill_curve.headline(faster, None).endswith("at 1,333 tokens a second")


def test_the_quadratic_part_is_found() -> None:
    exact = {n: timed(2.0 + 0.5 * n + 0.01 * n**2) for n in (10, 20, 40, 80)}
    fit = prefill_curve.fitted(exact)
    assert fit is not None
    assert (1e3 * fit.fixed_s, 1e3 * fit.linear_s, 1e3 * fit.quadratic_s) == pytest.approx((2.0, 0.5, 0.01))


# --- pass_curve


def test_a_pass_curve_has_its_slack_and_its_break_even(root: Path) -> None:
    found, page = finished(root, "pass_curve", "experiment.tokens=[1,2,5,121]", "experiment.context_tokens=8")
    assert steps(root, found, "curve_pass/ms") == [1, 2, 5]
    assert found.tags["limit.tokens 121"] == "beyond context"
    assert found.metrics["curve_pass/slack_x.5"] > 0
    assert "**Acceptance from which K draft tokens pay**" in page


def test_break_even_is_where_speculation_costs_nothing_more() -> None:
    passes = {1: timed(10.0), 2: timed(15.0), 5: timed(60.0)}
    assert pass_curve.slacks(passes) == {1: 1.0, 2: 1.5, 5: 6.0}
    # One draft: 1 + rate tokens for 1.5 + cost steps; four drafts are never worth six.
    paying = pass_curve.break_even(passes, [0.0, 0.2])
    assert paying[0.0][1] == pytest.approx(0.5)
    assert paying[0.2][1] == pytest.approx(0.7)
    assert paying[0.0][4] is None
    said = pass_curve.headline(passes, paying[0.0], 0.0)
    assert (
        said
        == "A pass over 5 tokens takes 6.00 times as long as over one; 4 draft tokens that cost nothing never pay off"
    )
    said = pass_curve.headline({1: timed(10.0), 2: timed(15.0)}, paying[0.2], 0.2)
    assert said.endswith(
        "as long as over one; 1 draft token of 20% of a step each would pay off from an acceptance of 70%"
    )


# --- context_curve


def test_a_context_curve_has_every_store_and_known_models(root: Path) -> None:
    found, page = finished(
        root, "context_curve", "experiment.contexts=[4,40,127,128]", "experiment.kv=[kv_int8]"
    )
    for curve in ("curve_context/step_ms", "curve_context/kv_mib"):
        assert steps(root, found, curve) == [4, 40, 127]
        assert steps(root, found, f"{curve}.kv_int8") == [4, 40, 127]
    # 2 layers of keys and values, 2 heads of 16 float32 numbers
    token_bytes = 2 * 2 * 2 * 16 * 4
    (*_, (_, held_mib)) = tracking.read_curve(tracking.open_store(root), found.run_id, "curve_context/kv_mib")
    assert held_mib * MIB == 127 * token_bytes
    weights_bytes = found.metrics["memory/weights_mib"] * MIB
    assert found.metrics["curve_context/equal_tokens"] == pytest.approx(weights_bytes / token_bytes)
    assert found.tags["limit.context 128"] == "beyond context"
    assert found.tags["limit.kv_int8 context 128"] == "beyond context"
    assert "| Llama 3.1 8B, 16 bits | 131,072 | 122,532 |" in page


def test_a_context_finding_follows_the_numbers() -> None:
    found = {10: ContextStep(timed(4.0), MIB, 1.0), 1010: ContextStep(timed(6.0), 8 * MIB, 1.0)}
    assert context_curve.headline(found, 5000.0) == (
        "A step behind 1,010 tokens takes 1.50 times as long as behind 10; its cache holds 8 MiB, "
        "and would be as large as the weights at 5,000 tokens"
    )
    # 1e-6 s a token at the bandwidth
    (note,) = context_curve._slope_notes({10: timed(4.0), 1010: timed(6.0)}, 1e-6)
    assert "1,000 more tokens of context add 2.00 ms to a step" in note
    assert note.endswith("bandwidth takes 1.00 ms")
    assert context_curve._slope_notes({10: timed(4.0)}, 1e-6) == []


# --- batch_capacity


def test_as_many_sequences_fit_as_predicted(root: Path) -> None:
    found, page = finished(
        root,
        "batch_capacity",
        "experiment.memory_gib=0.05",
        "experiment.tokens=[100,200]",
        "experiment.kv=[dense,kv_int8]",
    )
    assert found.tags["limit.dense tokens 200"] == found.tags["limit.kv_int8 tokens 200"] == "beyond context"
    # 100 tokens and the spare one, of 512 bytes; a byte a number and a scale of two for 16 of them
    room_bytes = 0.05 * GIB - 2**18
    assert found.metrics["batch_capacity/sequences_n.dense"] == pytest.approx(
        room_bytes / (101 * 512), rel=0.05
    )
    assert found.metrics["batch_capacity/sequences_n.kv_int8"] == pytest.approx(
        room_bytes / (101 * 144), rel=0.05
    )
    assert "beside the weights" in page


def test_what_is_not_free_stays_a_prediction(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "free_bytes", MIB)
    options = ("experiment.memory_gib=0.05", "experiment.tokens=[100]", "experiment.kv=[]", "study=full")
    assert run.main([*arguments(root, "batch_capacity"), *options]) == 0
    store = tracking.open_store(root)
    (found,) = (one for one in tracking.find_runs(store, "full") if "experiment" in one.tags)
    assert found.tags["limit.dense tokens 100"] == "predicted only, out of memory"
    (line,) = (
        line
        for line in tracking.read_text(store, found.run_id, "report.md").splitlines()
        if line.startswith("| dense |")
    )
    assert line.split(" | ")[4] == "-"


def test_capacity_is_room_by_what_a_sequence_takes() -> None:
    assert Memory.of(GIB // 4, None) == Memory(GIB, GIB // 4)
    assert Memory.of(3 * GIB, None).gib == 8
    assert Memory.of(3 * GIB, 2.5).room_bytes == 0
    assert Capacity(10, 100, 1050).sequences == 10
    assert Capacity(10, 100, 1050, resident_bytes=1000).sequences == 10
    assert Capacity(10, 100, 1050, resident_bytes=2000).sequences == 5
    found = {"dense": {8: Capacity(10, 100, 1050, 1.5), 16: Capacity(5, 200, 1050)}, "kv_int4": {}}
    assert batch_capacity.headline(found, "dense", Memory(GIB, 0)) == (
        "5 sequences of 16 tokens fit into 1 GiB beside the weights; arithmetic would limit their steps at no batch"
    )
    del found["dense"][16]
    assert batch_capacity.headline(found, "dense", Memory(GIB, 0)).endswith("from 2 rows on")


def test_tensors_are_found_wherever_they_are() -> None:
    class Part:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensors = {"one": tensor, "many": [tensor, (torch.zeros(2),)]}
            self.whole = self

    first = torch.zeros(1)
    assert sorted(tensor.numel() for tensor in tensors_in(Part(first))) == [1, 2]


# --- quantized_decode


def test_a_step_by_the_bytes_of_a_weight(root: Path) -> None:
    found, page = finished(
        root,
        "quantized_decode",
        "experiment.formats=[fp32,bf16,quanto_int8,int4]",
        "experiment.context_tokens=4",
    )
    read = {
        name: found.metrics[f"quantized_decode/read_mib.{name}"] for name in ("fp32", "bf16", "quanto_int8")
    }
    assert read["fp32"] > read["bf16"] > read["quanto_int8"]
    assert found.metrics["quantized_decode/off_line_frac"] >= 0
    assert "| bf16 | " in page


def test_a_line_through_the_origin_and_how_far_it_is() -> None:
    exact = OriginLine.through({1.0: 10.0, 2.0: 20.0, 4.0: 40.0})
    assert (exact.slope_ms, exact.off_frac, exact.offset_ms) == pytest.approx((10.0, 0.0, 0.0))
    floored = OriginLine.through({1.0: 15.0, 2.0: 25.0, 4.0: 45.0})
    assert (floored.offset_ms, floored.offset_slope_ms) == pytest.approx((5.0, 10.0))
    assert floored.off_frac > 0.1
    assert OriginLine.through({2.0: 16.0}) == OriginLine(8.0, 0.0, None, 8.0)


def test_a_quantized_finding_follows_the_numbers() -> None:
    floors = Floors(1.0, 0.5, 0.1)
    found = {
        "bf16": FormatStep(timed(20.0), floors, 200, 2.0, "torch"),
        "int8": FormatStep(timed(25.0), floors, 100, 1.0, "torch int8pack"),
    }
    line = OriginLine(1.0, 0.3, None, 1.0)
    assert quantized_decode.headline(found, line) == (
        "With int8 weights a step reads 50% of what it reads with bf16, and takes 125% of the time; "
        "a line through the origin is off by up to 30%"
    )
    (note,) = quantized_decode._line_notes(OriginLine(1.0, 0.3, -2.0, 4.0))
    assert note.endswith("(least squares of relative errors)")
    (note,) = quantized_decode._line_notes(OriginLine(1.0, 0.3, 2.0, 4.0))
    assert "the offset is what a step takes whatever its weights are" in note
    only = {"int8": found["int8"]}
    assert quantized_decode.headline(only, line) == "With int8 weights a step takes 25.0 ms"


# --- roofline


def test_every_kind_of_pass_is_under_the_roof(root: Path) -> None:
    found, page = finished(
        root,
        "roofline",
        "experiment.prompts=[8,32]",
        "experiment.batches=[1,2]",
        "experiment.contexts=[40,400]",
        "experiment.context_tokens=8",
        "experiment.busy_s=0.05",
    )
    for kind in (
        "prefill, 8 tokens",
        "prefill, 32 tokens",
        "decode, 1 row",
        "decode, 2 rows",
        "verify, 4 drafts",
    ):
        assert f"| {kind} | " in page
    assert found.tags["limit.decode behind 400"] == "beyond context"
    assert found.metrics["roofline/ridge_flop_per_byte"] > 0
    for metric in ("busy", "mbu", "mfu"):
        assert found.metrics[f"roofline/{metric}_pct.decode"] > 0
        assert found.metrics[f"roofline/{metric}_pct.prefill"] > 0


def test_an_idle_unit_can_be_busy() -> None:
    cost = ModelCost(
        weights_read_bytes=2000,
        embedding_row_bytes=0,
        kv_bytes_per_token=0.0,
        body_parameters=900,
        head_parameters=100,
        attention_width=0,
    )
    event = PassEvent("decode", 0.0, 0.0, (1,), 1, (9,), 9)
    step = MeasuredKind(Kind(DECODE, "1 row", 1, 1, 8), event, cost, Ceilings(1e-3, 0.1)).taking(4.0)
    assert step.articles_intensity == 1.0
    assert (step.mbu_frac, step.mfu_frac) == pytest.approx((0.5, 0.005))
    said = roofline.headline(
        [roofline.Watched(step, Utilization("CPU utilization of 2 cores", 0.95, 4.0))], [step], step.ceilings
    )
    assert said == (
        "Decoding 1 row does 0.5% of the arithmetic that this machine can do, while the CPU utilization of 2 cores "
        "reads 95%: 1 operations a byte, and the ridge is at 100 operations a byte"
    )
    said = roofline.headline(
        [roofline.Watched(step, Utilization("GPU utilization", None, 4.0))], [step], step.ceilings
    )
    assert "utilization" not in said
    prompt = MeasuredKind(Kind(PREFILL, "8 tokens", 1, 8, 0), event, cost, step.ceilings).taking(4.0)
    assert roofline.to_watch([prompt, step, step]) == [step, prompt]


def test_the_counter_counts_this_process_alone() -> None:
    calls: list[int] = []
    found = utilization.utilization(lambda: calls.append(1), torch.device("cpu"), threads=1, seconds=0.02)
    assert found.counter == "CPU utilization of the core"
    assert found.busy_frac is not None
    assert found.busy_frac > 0
    assert found.pass_ms * (len(calls) - 1) >= 20


# --- all of them


def test_predictions_are_shares_of_what_was_measured() -> None:
    found = {1: timed(10.0), 1000: timed(10.0)}
    assert floor_lines.shares_of_measured({}, found) == ""
    assert floor_lines.shares_of_measured({1: 9.0, 2: 1.0}, found) == (
        "0.90 to 0.90 of what was measured: close everywhere"
    )
    assert floor_lines.shares_of_measured({1: 9.0, 1000: 4.0}, found).endswith(
        "off by more than 25% at 1,000"
    )


@pytest.mark.parametrize(
    ("name", "more", "mentions"),
    [
        ("prefill_curve", "experiment.tokens=[]", "experiment.tokens=[]"),
        ("prefill_curve", "experiment.tokens=[0,4]", "at least 1"),
        ("pass_curve", "experiment.tokens=[2,3]", "the plain step"),
        ("pass_curve", "experiment.context_tokens=0", "experiment.context_tokens=0"),
        ("pass_curve", "experiment.draft_costs=[-0.1]", "at least 0"),
        ("context_curve", "experiment.contexts=[0]", "experiment.contexts=[0]"),
        ("context_curve", "experiment.kv=[sparse]", "kv_int8"),
        ("batch_capacity", "experiment.memory_gib=0", "experiment.memory_gib=0"),
        ("batch_capacity", "experiment.tokens=[1]", "at least 2"),
        ("batch_capacity", "experiment.kv=[sparse]", "kv_int8"),
        ("quantized_decode", "experiment.formats=[int9]", "int8"),
        ("quantized_decode", "weights=int8", "experiment.formats=[...]"),
        ("quantized_decode", "experiment.context_tokens=0", "experiment.context_tokens=0"),
        ("roofline", "experiment.batches=[]", "experiment.batches=[]"),
        ("roofline", "experiment.drafts=[0]", "at least 1"),
        ("roofline", "experiment.busy_s=0", "above 0"),
        ("roofline", "strategy=prompt_lookup", "without a drafter"),
    ],
)
def test_bad_input_is_one_clear_line(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, more: str, mentions: str
) -> None:
    assert run.main([*arguments(root, name), "study=bad", more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions in line
    assert tracking.find_runs(tracking.open_store(root), "bad") == []
