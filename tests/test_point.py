"""One point: what is checked before weights are read, hashes, and what a result derives from its traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from toy_folders import EOS_ID, repeating_prompts, save_model, save_prompts

from experiments import measured_point, plugins
from experiments.bench import MIB, UnfitPartsError, Watcher
from experiments.config import RunConfig, compose_run
from experiments.hardware import GEMM_GFLOP_S, OVERHEAD_MS, READ_GB_S, Values
from experiments.measured_point import PointResult, measure_point, ratio_metrics
from experiments.memory import MemoryProbeError, ProcessMemory
from experiments.models import ModelSource
from experiments.point import PreparedPoint, prepare
from experiments.statistics import TOO_FEW, Ratio

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (3, 6, 5)
PICKY = '''
"""Refuses every cache, and says which."""

from dataclasses import dataclass

from specdec.kv_stores.dense import DenseOptions

GROUP = "kv"


@dataclass
class PickyOptions(DenseOptions):
    def check(self, shape):
        raise ValueError(
            f"a cache of {shape.num_slots} slots, {shape.capacity} tokens, {shape.longest_pass} per pass"
        )
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("point")
    save_model(folder / "target")
    save_model(folder / "wide", hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    save_prompts(folder / "prompts.jsonl", repeating_prompts(LENGTHS))
    return folder


def point(root: Path, *overrides: str, model: str = "target") -> PreparedPoint:
    base = [
        "strategy=prompt_lookup",
        f"model.target={root / model}",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
        "workload.max_new_tokens=16",
        "dtype=fp32",
        "threads=1",
        "measure.aa=false",
        "measure.ceilings=skip",
        "measure.memory=false",
    ]
    given = {override.partition("=")[0] for override in overrides}
    return prepare(compose_run([*(one for one in base if one.partition("=")[0] not in given), *overrides]))


# --- preparing


def test_requests_are_the_prompts_in_order(root: Path) -> None:
    found = point(root)
    assert [request.request_id for request in found.requests] == [0, 1, 2]
    assert [list(request.prompt_ids) for request in found.requests] == repeating_prompts(LENGTHS)
    assert {request.max_new_tokens for request in found.requests} == {16}
    assert found.capacity == 12 + 16
    assert found.tokenize_ms > 0


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (8, [3])])
def test_blocks_are_what_is_decoded_together(root: Path, batch_size: int, sizes: list[int]) -> None:
    found = point(root, f"batch_size={batch_size}", "measure.repeats=2")
    assert [len(block) for block in found.blocks] == sizes
    assert [request for block in found.blocks for request in block] == list(found.requests)
    assert found.num_block_runs == 2 * 2 * len(sizes)
    with_again = point(root, f"batch_size={batch_size}", "measure.aa=true")
    assert with_again.num_block_runs == 3 * len(sizes)


def test_every_auto_is_resolved(root: Path) -> None:
    config = point(root, "strategy=specdec", "dtype=auto", "threads=null", "device=auto").config
    assert config.dtype in ("bf16", "fp32")
    assert config.device in ("cpu", "cuda")
    assert config.threads is not None
    assert config.threads >= 1
    assert config.drafter.weights == "int4"


def test_kernels_that_were_left_open_hash_as_those_that_run(root: Path) -> None:
    """Of the target's weights, and of the draft's, which are an option of the drafter."""
    open_ones = ("strategy=specdec", "weights=int8", "drafter.weights=int4", "dtype=bf16")
    chosen = point(root, *open_ones).with_kernels()
    weights, draft = chosen.config.weights, plugins.written_options("weights", chosen.config.drafter.weights)
    assert {weights.kernel, draft.kernel} <= {"torch_int8pack", "onednn_u8s8", "torch_int4pack", "bnb_nf4"}
    assert chosen.arms.strategy.all_weights == [weights, draft]
    assert chosen.arms.twin.weights == weights
    named = point(
        root,
        *open_ones,
        f"weights.kernel={weights.kernel}",
        f'drafter.weights="int4 kernel={draft.kernel}"',
    )
    assert named.config_hash == chosen.config_hash == chosen.with_kernels().config_hash
    assert point(root, *open_ones).config_hash != chosen.config_hash
    assert named.kernels(named.arms.strategy) == chosen.kernels(chosen.arms.strategy)


def test_hashes_are_stable(root: Path) -> None:
    assert point(root).config_hash == point(root).config_hash
    assert point(root).workload_hash == point(root).workload_hash
    assert len(point(root).config_hash) == 16


@pytest.mark.parametrize(
    "override",
    ["seed=1", "draft_length.max=3", "drafter.max_ngram=2", "dtype=fp64", "threads=2", "batch_size=2"],
)
def test_any_setting_changes_the_configuration_hash_alone(root: Path, override: str) -> None:
    assert point(root, override).config_hash != point(root).config_hash
    assert point(root, override).workload_hash == point(root).workload_hash


def test_auto_hashes_as_what_it_resolves_to(root: Path) -> None:
    resolved = point(root, "dtype=auto").config.dtype
    assert point(root, "dtype=auto").config_hash == point(root, f"dtype={resolved}").config_hash


@pytest.mark.parametrize("override", ["workload.limit=2", "workload.max_new_tokens=15"])
def test_prompts_and_limits_change_the_workload_hash(root: Path, override: str) -> None:
    assert point(root, override).workload_hash != point(root).workload_hash


def test_the_longest_text_must_fit(root: Path) -> None:
    assert point(root, "workload.max_new_tokens=116").capacity == 128
    with pytest.raises(ValueError, match=r"prompt 2: 12 tokens \+ 117 new ones: 129 tokens exceed"):
        point(root, "workload.max_new_tokens=117")


def test_ceilings_are_measured_for_the_points_setting_or_skipped(root: Path) -> None:
    ready = point(root, "measure.ceilings=auto", "dtype=fp64")
    hardware = ready.hardware()
    assert hardware is not None
    assert (hardware.device, hardware.dtype, hardware.threads) == (ready.pool.device, ready.pool.dtype, 1)
    assert point(root, "measure.ceilings=skip").hardware() is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["kv=kv_int4", "draft_length.max=6", "kv.tail=6"],
            r"^kv\.tail=6: .* up to 7 tokens .*: at least 7$",
        ),
        (["kv=kv_int8", "kv.group=3"], r"^kv\.group=3: groups have to divide a head of 8 .*nearest: 2 or 4$"),
        (
            ["kv=kv_int4", "kv.tail=5", "exactness=bitwise", "exactness.pass_tokens=9"],
            r"^kv\.tail=5: .* up to 9 tokens \(.*exactness.pass_tokens\): at least 9$",
        ),
        (
            ["plugin={root}/picky.py", "kv=picky", "batch_size=2"],
            r"^a cache of 2 slots, 28 tokens, 5 per pass$",
        ),
    ],
    ids=["a pass", "a head", "passes of one shape", "a store from outside"],
)
def test_a_store_that_can_not_hold_the_cache_is_refused_before_anything_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ModelSource, "model", loaded)
    (root / "picky.py").write_text(PICKY, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        point(root, *(override.format(root=root) for override in overrides))


def test_the_least_that_a_store_asks_for_is_enough(root: Path) -> None:
    found = point(root, "kv=kv_int4", "draft_length.max=6", "kv.tail=7", "kv.group=4")
    assert (found.config.kv.tail, found.config.kv.group) == (7, 4)


def test_parts_that_turn_out_not_to_fit_are_one_line(root: Path) -> None:
    with pytest.raises(UnfitPartsError, match=r"weights=bnb_nf4: weights.keep=nothing: no linear layer"):
        measure_point(point(root, "weights=bnb_nf4", "weights.keep=[nothing]"))


# --- measuring


@pytest.fixture(scope="module")
def result(root: Path, one_thread: None) -> PointResult:
    """Quantized speculation on the wide model: three arms."""
    return measure_point(point(root, "weights=bnb_nf4", "dtype=bf16", "batch_size=2", model="wide"))


def test_all_arms_decode_every_block(result: PointResult) -> None:
    arms = result.point.arms
    assert [arm.name for arm in arms.distinct] == ["prompt_lookup", "twin", "plain"]
    for arm in arms.distinct:
        assert sorted(trace.block for trace in result.traces_of(arm)) == [0, 1]
        assert sorted(result.timelines_of(arm)) == [(0, 0), (1, 0), (2, 0)]


def test_the_strategy_is_graded_against_its_twin(result: PointResult) -> None:
    assert len(result.comparisons) == 3
    assert result.equivalence in ("exact", "near_tie")
    assert not result.lossless  # 4-bit weights: whatever the grades are


def test_metrics_are_the_strategys_own(result: PointResult) -> None:
    metrics = result.metrics
    assert metrics["memory/quantized_share"] > 0.8
    assert result.metrics_of(result.point.arms.plain)["memory/quantized_share"] == 0
    assert metrics["memory/weights_mib"] < result.metrics_of(result.point.arms.plain)["memory/weights_mib"]
    for name in ("decode_vs_plain", "decode_vs_twin", "total_vs_plain", "total_vs_twin"):
        assert (f"speedup/{name}" in metrics) == (result.speedups[name] is not None)


def test_cache_bytes_are_those_of_the_most_tokens_held(result: PointResult) -> None:
    # 2 layers, keys and values, 2 heads of 16 in bf16.
    per_token = 2 * 2 * 2 * 16 * 2
    metrics = result.metrics
    most = max(
        event.kv_tokens for trace in result.traces_of(result.point.arms.strategy) for event in trace.passes
    )
    assert metrics["memory/kv_bytes_per_token"] == per_token
    assert metrics["memory/kv_mib"] == most * per_token / MIB
    # two slots of 28 tokens and one spare
    assert metrics["memory/kv_allocated_mib"] == 2 * (12 + 16 + 1) * per_token / MIB


def test_memory_is_what_is_stored_while_measuring(result: PointResult) -> None:
    """bitsandbytes stores a layer's scales otherwise from its first forward on."""
    from quant.footprint import stored_bytes

    arms = result.point.arms
    model = result.point.pool.target(arms.strategy.weights)
    assert result.footprints[arms.strategy.name].weights_bytes == stored_bytes(model)


def test_a_ratio_is_logged_with_the_interval_that_it_has() -> None:
    assert ratio_metrics("a", None) == {}
    assert ratio_metrics("a", Ratio(1.5, None, None, 5)) == {"a": 1.5}
    assert ratio_metrics("a", Ratio(1.5, 1.25, 2.0, 6)) == {"a": 1.5, "a.ci_low": 1.25, "a.ci_high": 2.0}


def test_a_few_pairs_are_no_verdict(result: PointResult) -> None:
    assert result.verdict == TOO_FEW


def test_what_was_not_asked_for_is_not_measured(result: PointResult) -> None:
    assert (result.memory, result.memory_error, result.measured.ceilings) == (None, None, None)
    assert {trace.arm for trace in result.traces} == {"prompt_lookup", "twin", "plain"}
    unwanted = ("roofline/", "noise/", "memory/peak", "memory/steady", "memory/base")
    assert not [name for name in result.metrics if name.startswith(unwanted)]
    assert list(result.seconds) == ["load", "warm up and measure", "compare outputs", "measure fidelity"]


def test_the_arm_again_shows_the_noise_and_is_no_reference(root: Path) -> None:
    found = measure_point(point(root, "measure.aa=true", "measure.warmup=0"))
    assert sorted(trace.block for trace in found.measured.traces_of("reference again")) == [0, 1, 2]
    assert found.measured.again == ("reference again", "reference")
    assert found.measured.noise_floor is not None
    assert found.metrics["noise/again_vs_itself"] == found.measured.noise_floor.value
    assert [arm.name for arm in found.point.arms.distinct] == ["prompt_lookup", "reference"]


def known(key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
    return {READ_GB_S: 32.0, GEMM_GFLOP_S: 1024.0, OVERHEAD_MS: 0.125}


def test_ceilings_give_shares_of_them(root: Path) -> None:
    ready = point(root, "measure.ceilings=auto", "measure.warmup=0")
    found = measure_point(ready, remember=known)
    assert "measure ceilings" in found.seconds
    read_mib = found.metrics["memory/weights_read_mib"]
    assert found.metrics["roofline/floor_ms"] == pytest.approx(1e3 * read_mib * MIB / 32e9)
    assert found.metrics["roofline/target_overhead_ms"] == 0.125
    assert 0 < found.metrics["roofline/mbu_target_pct"] < 100
    assert 0 < found.metrics["roofline/mfu_prefill_pct"] < 100
    assert "roofline/mbu_draft_pct" not in found.metrics  # copies have no model


def test_memory_is_asked_of_the_resolved_strategy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []

    def answer(config: RunConfig) -> ProcessMemory:
        asked.append(config)
        return ProcessMemory(3.0, 2.0, 1.0)

    monkeypatch.setattr(measured_point, "measure_memory", answer)
    ready = point(root, "measure.memory=true", "workload.limit=1", "measure.warmup=0")
    found = measure_point(ready)
    assert asked == [ready.config]
    assert {name: found.metrics[f"memory/{name}_mib"] for name in ("peak", "steady", "base")} == {
        "peak": 3.0,
        "steady": 2.0,
        "base": 1.0,
    }
    assert list(found.seconds)[-1] == "measure memory"


def test_memory_that_cant_be_measured_costs_nothing_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig) -> ProcessMemory:
        raise MemoryProbeError("killed by SIGKILL")

    monkeypatch.setattr(measured_point, "measure_memory", fail)
    found = measure_point(point(root, "measure.memory=true", "workload.limit=1", "measure.warmup=0"))
    assert (found.memory, found.memory_error) == (None, "killed by SIGKILL")
    assert "latency/ttft_ms.p50" in found.metrics
    assert "memory/peak_mib" not in found.metrics


def test_a_baseline_compares_with_nothing(root: Path) -> None:
    found = measure_point(point(root, "strategy=baseline", "workload.limit=1", "measure.warmup=0"))
    assert (found.comparisons, found.equivalence, found.speedups) == ([], "n/a", {})
    assert found.verdict is None
    assert not [
        name
        for name in found.metrics
        if name.startswith(("speedup/", "quality/", "spec/")) and name != "spec/tokens_per_pass"
    ]
    assert found.lossless


def test_sampling_is_not_compared_token_for_token(root: Path) -> None:
    found = measure_point(point(root, "sampling.temperature=1", "workload.limit=1", "measure.warmup=0"))
    assert (found.comparisons, found.equivalence) == ([], "n/a")
    assert "quality/exact_match_pct" not in found.metrics


def test_an_answer_ends_with_the_models_end_of_text(root: Path) -> None:
    found = measure_point(
        point(root, "strategy=baseline", "sampling.temperature=3", "workload.max_new_tokens=100")
    )
    answers = [one.token_ids for one in found.timelines_of(found.point.arms.strategy).values()]
    # At this temperature a token is the end with a probability of about 1 / 61; the seed is fixed.
    assert any(answer[-1] == EOS_ID for answer in answers)
    for answer in answers:
        assert EOS_ID not in answer[:-1]
        assert answer[-1] == EOS_ID or len(answer) == 100


def test_a_watcher_sees_sizes_then_every_block_then_the_traces(root: Path) -> None:
    seen: list[object] = []
    ready = point(root, "workload.limit=2", "measure.warmup=0")
    watcher = Watcher(
        on_loaded=lambda sizes: seen.append(sorted(sizes)),
        on_progress=seen.append,
        on_measured=lambda traces: seen.append([trace.arm for trace in traces]),
    )
    measure_point(ready, watcher)
    assert seen[0] == ["prompt_lookup", "reference"]
    assert seen[-1] == seen[1:-1]
    assert len(seen) == 2 + ready.num_block_runs
    assert set(map(str, seen[1:-1])) == {"prompt_lookup", "reference"}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A point sets torch's threads for its process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
