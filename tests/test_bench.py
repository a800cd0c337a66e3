"""Arms on the bench: what makes a run noisy, where passes went, and arms that fail; traces are hand-written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_engine import build_decoder, model_drafter, requests_for
from toy_models import tiny_model
from toy_traces import forward, step, trace

from experiments import bench
from experiments.bench import (
    AA_CONFIDENCE,
    MIB,
    NOISY,
    OK,
    Entry,
    Footprint,
    Measured,
    UnfitPartsError,
    Watcher,
    measure_bench,
)
from experiments.config import MeasureConfig, compose_run
from experiments.load import MOST_FOREIGN_CORES, ForeignLoad
from experiments.roofline import Ceilings, ModelCost
from experiments.statistics import FASTER, NO_DIFFERENCE, SLOWER, TOO_FEW, Ratio, decode_speedup
from experiments.strategy import Arm, arms_of
from experiments.trace import PassEvent, Trace
from quant.footprint import stored_bytes
from quant.kv.sealed_groups import SealedGroupsOptions
from specdec.decoding.base import Decoder
from specdec.drafters.layer_skip import without_layers
from specdec.runner import ModelRunner

QUIET, BUSY = ForeignLoad(0.0), ForeignLoad(MOST_FOREIGN_CORES + 0.01)
# 1e9 bytes and 1e9 operations per second: 1e6 bytes take a millisecond.
CEILINGS = Ceilings(read_gb_s=1.0, gemm_gflop_s=1.0)
COST = ModelCost(
    weights_read_bytes=100_000_000,
    embedding_row_bytes=0,
    kv_bytes_per_token=1_000_000,
    body_parameters=5_000_000,
    head_parameters=1_000_000,
    attention_width=0,
)
DRAFT_COST = replace(COST, weights_read_bytes=10_000_000, kv_bytes_per_token=500_000)
FOOTPRINT = Footprint(128 * MIB, 32 * MIB, 0.25, 10.5, COST)
AGAIN = ("reference again", "reference")


def decoding(arm: str, tokens_s: Sequence[float]) -> list[Trace]:
    """A prompt for each of `tokens_s`, the time of each of the 8 tokens behind its first."""
    return [
        trace(
            step(0, 0.125, "prefill", {request: [0]}),
            *(step(0.125 + i * s, 0.125 + (i + 1) * s, "decode", {request: [i + 1]}) for i in range(8)),
            arm=arm,
            block=request,
        )
        for request, s in enumerate(tokens_s)
    ]


def twice(factors: Sequence[float], load: ForeignLoad = QUIET, **more: Any) -> Measured:
    """An arm against itself, whose second measurement took `factors` times as long, prompt by prompt."""
    again, reference = AGAIN
    traces = [*decoding(again, factors), *decoding(reference, [1.0] * len(factors))]
    return Measured(traces, {again: FOOTPRINT, reference: FOOTPRINT}, load, again=AGAIN, **more)


ALIKE = (0.97, 1.04, 1.0, 0.98, 1.03, 1.01, 0.99, 0.98)
SLOW = (1.5, 1.6, 1.4, 1.5, 1.55, 1.45, 1.5, 1.5)


# --- is it noisy?


def test_an_arm_like_itself_on_a_quiet_machine_is_ok() -> None:
    measured = twice(ALIKE)
    assert measured.validity == OK == "ok"
    assert measured.noise_floor is not None
    assert measured.noise_floor.verdict == NO_DIFFERENCE


def test_foreign_load_is_noisy() -> None:
    assert twice(ALIKE, BUSY).validity == NOISY == "noisy"
    assert Measured([], {}, BUSY).validity == NOISY
    assert Measured([], {}, ForeignLoad(MOST_FOREIGN_CORES)).validity == OK


@pytest.mark.parametrize("factors", [SLOW, [1 / factor for factor in SLOW], [1.25] * 8])
def test_an_arm_that_differs_from_itself_is_noisy(factors: Sequence[float]) -> None:
    assert twice(factors).validity == NOISY


def test_only_a_clear_difference_counts() -> None:
    """One honest run in twenty has an A/A interval of 95 % without 1 in it."""
    factors = (0.995, 1.06, 1.03, 1.01, 1.05, 1.02, 1.03, 1.01)
    measured = twice(factors)
    assert measured.noise_floor is not None
    assert measured.noise_floor.verdict == SLOWER
    again, reference = (measured.timelines_of(arm) for arm in AGAIN)
    clear = decode_speedup(again, reference, AA_CONFIDENCE)
    assert clear is not None
    assert clear.verdict == NO_DIFFERENCE
    assert measured.validity == OK


def test_too_few_pairs_tell_nothing() -> None:
    assert twice(SLOW[:5]).validity == OK


@pytest.mark.parametrize("failed", AGAIN)
def test_an_arm_that_failed_is_no_measure_of_noise(failed: str) -> None:
    measured = twice(SLOW, failures={failed: RuntimeError("x")})
    assert measured.noise_floor is None
    assert measured.validity == OK


def test_without_the_arm_again_there_is_no_noise_floor() -> None:
    measured = replace(twice(SLOW), again=None)
    assert (measured.noise_floor, measured.validity) == (None, OK)


@pytest.mark.parametrize(
    ("ratio", "quiet", "noisy"),
    [
        (Ratio(1.5, 1.2, 1.9, 6), FASTER, NOISY),
        (Ratio(0.5, 0.4, 0.6, 6), SLOWER, NOISY),
        (Ratio(1.0, 0.9, 1.1, 6), NO_DIFFERENCE, NOISY),
        (Ratio(1.5, None, None, 5), TOO_FEW, TOO_FEW),
        (None, TOO_FEW, TOO_FEW),
    ],
)
def test_there_is_no_verdict_from_a_noisy_run(ratio: Ratio | None, quiet: str, noisy: str) -> None:
    assert twice(ALIKE).verdict(ratio) == quiet
    assert twice(ALIKE, BUSY).verdict(ratio) == noisy
    assert twice(SLOW).verdict(ratio) == noisy


# --- passes


def two_arms(**more: Any) -> Measured:
    """A speculative arm over two blocks, a plain one over one."""
    one = trace(
        step(0.0, 0.5, "prefill", {0: [1]}),
        passes=[
            forward("prefill", 0.0, 0.5, (7,), kv_tokens=7),
            forward("draft_prefill", 0.5, 0.625, (7,), kv_tokens=7),
            forward("draft", 0.625, 0.75, kv_tokens=8),
            forward("verify", 0.75, 1.25, (4,), kv_tokens=11),
        ],
        arm="specdec",
    )
    other = trace(passes=[forward("decode", 2.0, 2.25)], arm="specdec", block=1)
    plain = trace(passes=[forward("decode", 3.0, 3.25, kv_tokens=8)], arm="reference")
    speculative = replace(FOOTPRINT, draft=DRAFT_COST, target_overhead_ms=16.0, draft_overhead_ms=4.0)
    footprints = {"specdec": speculative, "reference": replace(FOOTPRINT, target_overhead_ms=16.0)}
    return Measured([one, other, plain], footprints, QUIET, **{"ceilings": CEILINGS, **more})


def test_passes_are_those_of_an_arm_and_of_the_phases() -> None:
    measured = two_arms()

    def starts(arm: str, *phases: str) -> list[float]:
        return [event.start_s for event in measured.passes_of(arm, *phases)]

    assert starts("specdec", "decode", "verify") == [0.75, 2.0]
    assert starts("specdec", "draft") == [0.625]
    assert starts("reference", "decode", "verify") == [3.0]
    assert starts("reference", "draft") == starts("nobody", "decode") == []


def test_the_parts_of_a_pass_are_worked_out_and_add_up() -> None:
    (label, parts), *rest = two_arms().parts_of("reference").items()
    # 100 MB of weights; 8 cached tokens of 1 MB read and 1 written.
    assert (label, rest) == ("target", [])
    assert (parts.pass_ms, parts.floor_ms, parts.kv_ms, parts.overhead_ms) == (250, 100, 9, 16)
    assert parts.rest_ms == 125
    assert parts.pass_ms == parts.floor_ms + parts.kv_ms + parts.overhead_ms + parts.rest_ms


def test_the_parts_are_of_the_mean_pass_behind_the_prefill() -> None:
    parts = two_arms().parts_of("specdec")
    assert set(parts) == {"target", "draft"}
    # A verify pass of 500 ms that reads 11 tokens and writes 4, a decode pass of 250 that reads 8 and writes 1.
    assert (parts["target"].pass_ms, parts["target"].floor_ms, parts["target"].kv_ms) == (375, 100, 12)
    assert (parts["draft"].pass_ms, parts["draft"].floor_ms, parts["draft"].kv_ms) == (125, 10, 4.5)
    assert parts["draft"].overhead_ms == 4
    for part in parts.values():
        assert part.pass_ms == part.floor_ms + part.kv_ms + part.overhead_ms + part.rest_ms


@pytest.mark.parametrize("arm", ["specdec", "reference"])
def test_parts_are_logged_as_they_are(arm: str) -> None:
    measured = two_arms()
    metrics = measured.metrics_of(arm)
    for label, parts in measured.parts_of(arm).items():
        assert metrics[f"roofline/{label}_pass_ms.mean"] == parts.pass_ms
        assert metrics[f"roofline/{label}_kv_ms"] == parts.kv_ms
        assert metrics[f"roofline/{label}_overhead_ms"] == parts.overhead_ms
        assert metrics[f"roofline/{label}_rest_ms"] == parts.rest_ms
    assert ("roofline/mbu_draft_pct" in metrics) == (arm == "specdec")


def test_shares_of_the_ceilings_are_of_bytes_and_operations() -> None:
    metrics = two_arms().metrics_of("specdec")
    assert metrics["roofline/floor_ms"] == 100
    # In 750 ms: twice the weights, 11 + 4 + 8 + 1 tokens.
    assert metrics["roofline/mbu_target_pct"] == pytest.approx(100 * (200 + 24) / 750)
    assert metrics["roofline/mbu_draft_pct"] == pytest.approx(100 * (10 + 4.5) / 125)
    # In 500 ms: 7 tokens through the body, one through the head, two operations each.
    assert metrics["roofline/mfu_prefill_pct"] == pytest.approx(100 * 2 * (7 * 5 + 1) / 500)


def test_without_ceilings_or_overhead_there_are_no_shares_or_parts() -> None:
    measured = two_arms(ceilings=None)
    assert measured.parts_of("specdec") == {}
    assert not [name for name in measured.metrics_of("specdec") if name.startswith("roofline/")]
    unknown = replace(two_arms(), footprints={"reference": FOOTPRINT})
    assert unknown.parts_of("reference") == {}
    assert "roofline/mbu_target_pct" in unknown.metrics_of("reference")
    assert "roofline/target_rest_ms" not in unknown.metrics_of("reference")


def test_cached_bytes_are_the_most_of_both_models() -> None:
    metrics = two_arms().metrics_of("specdec")
    assert metrics["memory/kv_mib"] == (11 * 1_000_000 + 8 * 500_000) / MIB
    arms = two_arms()
    shared = {**arms.footprints, "specdec": replace(arms.footprints["specdec"], draft_has_own_cache=False)}
    assert replace(arms, footprints=shared).metrics_of("specdec")["memory/kv_mib"] == 11 * 1_000_000 / MIB
    assert metrics["memory/kv_bytes_per_token"] == 1_000_000
    assert (metrics["memory/weights_mib"], metrics["memory/kv_allocated_mib"]) == (128, 32)
    assert (metrics["memory/quantized_share"], metrics["memory/bits_per_weight"]) == (0.25, 10.5)


# --- measuring: tiny models

SETTING = MeasureConfig(warmup=0, aa=False, ceilings="skip", memory=False)
MODEL = tiny_model(dtype=torch.float32)
BLOCKS = [requests_for([[3, 5, 8]], 4), requests_for([[1, 2]], 4)]


def decoder() -> Decoder:
    return build_decoder(ModelRunner(MODEL, 1, 16), num_slots=1)


def speculative() -> Decoder:
    draft = tiny_model(seed=1, dtype=torch.float32)
    return build_decoder(ModelRunner(MODEL, 1, 16), num_slots=1, drafter=model_drafter(draft, 1, 16))


def arm(name: str, *overrides: str) -> Arm:
    return replace(arms_of(compose_run([*overrides] or ["strategy=baseline"])).strategy, name=name)


def entry(name: str, make: Callable[[], Decoder] = decoder) -> Entry:
    return Entry(arm(name), make)


def failing_while_decoding() -> Decoder:
    made: Any = decoder()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("injected while decoding")

    made.runner.decode = fail
    return made


def failing_while_built(error: Exception) -> Callable[[], Decoder]:
    def make() -> Decoder:
        raise error

    return make


def measured(*entries: Entry, **more: Any) -> Measured:
    return measure_bench(entries, BLOCKS, SETTING, **{"threads": 1, "seed": 0, **more})


@pytest.fixture(autouse=True)
def _threads(one_thread: None) -> None: ...


@pytest.mark.parametrize(
    "make", [failing_while_decoding, failing_while_built(RuntimeError("injected while loading"))]
)
def test_an_arm_that_fails_has_no_figures_and_the_others_go_on(make: Callable[[], Decoder]) -> None:
    found = measured(entry("bad", make), entry("good"), essential=["good"])
    assert list(found.failures) == ["bad"]
    assert "injected" in str(found.failures["bad"])
    assert sorted((trace.arm, trace.block) for trace in found.traces) == [("good", 0), ("good", 1)]
    assert found.metrics_of("good")["latency/ttft_ms.n"] == 2


def test_an_arm_that_fails_late_leaves_none_of_its_traces() -> None:
    made: Any = decoder()
    whole, calls = made.runner.prefill, iter(range(10))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("injected in the second block")
        return whole(*arguments)

    made.runner.prefill = failing
    seen: list[list[str]] = []
    found = measured(
        entry("bad", lambda: made),
        entry("good"),
        watcher=Watcher(on_measured=lambda traces: seen.append([trace.arm for trace in traces])),
    )
    assert found.traces_of("bad") == []
    assert seen[0].count("bad") == 1  # what was recorded of it is not lost
    assert len(found.traces_of("good")) == 2


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (failing_while_decoding, RuntimeError),
        (failing_while_built(RuntimeError("injected")), RuntimeError),
        (failing_while_built(ValueError("weights=x: layer is too narrow")), UnfitPartsError),
    ],
)
def test_the_failure_of_an_essential_arm_is_raised(
    make: Callable[[], Decoder], expected: type[Exception]
) -> None:
    with pytest.raises(expected, match=r"injected|too narrow"):
        measured(entry("good"), entry("bad", make), essential=["bad"])


class Rated:
    """Hardware whose ceilings are known; it notes what overheads it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    def ceilings(self) -> Ceilings:
        return CEILINGS

    def overhead_ms(self, model_config: Any, weights: Any) -> float:
        self.asked.append((model_config.num_hidden_layers, weights.name))
        return 0.25 * len(self.asked)


def test_overheads_are_asked_once_per_model_and_format() -> None:
    hardware = Rated()
    plain, draft = entry("plain"), arm("specdec", "strategy=specdec", "drafter.weights=bnb_nf4")
    found = measured(plain, entry("again"), Entry(draft, speculative), hardware=hardware)
    assert hardware.asked == [(2, "plain"), (2, "bnb_nf4")]
    overheads = {
        name: (size.target_overhead_ms, size.draft_overhead_ms) for name, size in found.footprints.items()
    }
    assert overheads == {"plain": (0.25, None), "again": (0.25, None), "specdec": (0.25, 0.5)}
    assert found.ceilings == CEILINGS
    assert list(found.seconds) == ["load", "warm up and measure", "measure ceilings"]


def test_a_footprint_holds_the_draft_model_too() -> None:
    found = measured(entry("plain"), entry("specdec", speculative)).footprints
    assert found["plain"].weights_bytes == stored_bytes(MODEL)
    assert found["specdec"].weights_bytes == 2 * stored_bytes(MODEL)
    assert found["specdec"].kv_allocated_bytes == 2 * found["plain"].kv_allocated_bytes
    assert found["specdec"].target == found["specdec"].draft == found["plain"].target
    assert found["plain"].draft is None


def test_a_cost_is_counted_from_the_model() -> None:
    cost = measured(entry("plain")).footprints["plain"].target
    # 2 layers of width 32, 4 query and 2 key-value heads of 8, 48 inner, 61 words; matrices only.
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    assert (cost.body_parameters, cost.head_parameters) == (2 * layer, 61 * 32)
    assert cost.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert cost.attention_width == 2 * 4 * 8
    # A pass over a token reads one row of the table; of a rotation, two buffers of 4 frequencies.
    norms, row, rotation = 5 * 32, 32, 2 * 4
    assert cost.embedding_row_bytes == 4 * row
    assert cost.weights_read_bytes == 4 * (2 * layer + 61 * 32 + norms + row + rotation)


def test_the_bytes_of_a_quantized_cache_are_those_of_its_rows() -> None:
    """Two rows hold more than one as long as both: each has a dense tail of its own."""
    store = SealedGroupsOptions(block=4, tail=4).build

    def make() -> Decoder:
        return build_decoder(ModelRunner(MODEL, 2, 30, make_store=store), num_slots=2)

    found = measured(entry("kv", make))
    cost = found.footprints["kv"].target
    dense, sealed = 2 * 2 * 2 * 8 * 4, 2 * 2 * ((4 + 2 * 16 / 4) + (4 + 4)) * 1.0
    assert cost.kv_bytes_per_token == sealed
    assert [cost.kv_row_bytes[n] for n in (0, 1, 7, 8, 12)] == [
        0,
        dense,
        7 * dense,
        4 * sealed + 4 * dense,
        8 * sealed + 4 * dense,
    ]
    event = PassEvent("decode", 0.0, 1.0, (1,), 1, (12,), 20, other_kv_lengths=(8,))
    assert cost.held_kv_bytes(event.kv_lengths) == 8 * sealed + 4 * dense
    assert cost.kv_bytes(event) == 8 * sealed + 4 * dense + dense
    held = bench._memory(found.footprints["kv"], [trace(passes=[event])])
    assert held["memory/kv_mib"] * MIB == 12 * sealed + 8 * dense
    assert held["memory/kv_bytes_per_token"] == sealed
    allocated = found.footprints["kv"].kv_allocated_bytes
    assert held["memory/kv_allocated_mib"] * MIB == allocated


def test_a_model_that_drafts_for_itself_is_stored_once() -> None:
    def make() -> Decoder:
        return build_decoder(ModelRunner(MODEL, 1, 16), num_slots=1, drafter=model_drafter(MODEL, 1, 16))

    assert measured(entry("self", make)).footprints["self"].weights_bytes == stored_bytes(MODEL)


def test_the_bench_tells_its_load_and_what_did_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def read(self) -> ForeignLoad:
            return BUSY

    def unsettled(*arguments: Any, on_unsettled: Callable[[str], None], **more: Any) -> list[Trace]:
        on_unsettled("one")
        return []

    monkeypatch.setattr(bench, "LoadMeter", Meter)
    monkeypatch.setattr(bench, "measure", unsettled)
    found = measured(entry("one"))
    assert (found.load, found.unsettled, found.validity) == (BUSY, ["one"], NOISY)


def test_a_draft_of_the_targets_own_layers_stores_nothing_more() -> None:
    model = tiny_model("llama")
    runners = [ModelRunner(model, 1, 8), ModelRunner(without_layers(model, 1), 1, 8)]
    assert bench._footprint(*runners).weights_bytes == bench._footprint(runners[0]).weights_bytes


def test_a_draft_on_the_targets_cache_keeps_nothing_of_its_own() -> None:
    model = tiny_model("llama")
    target = ModelRunner(model, 1, 8)
    whole = bench._footprint(target, ModelRunner(model, 1, 8, cache=target.cache.view()))
    half = bench._footprint(target, ModelRunner(without_layers(model, 1), 1, 8, cache=target.cache.view(1)))
    for found in (whole, half):
        assert found.kv_allocated_bytes == target.cache.store.allocated_bytes()
        assert not found.draft_has_own_cache
        assert found.draft is not None
    assert whole.draft == whole.target
    # But its passes read what its layers hold.
    assert half.draft is not None
    assert 2 * half.draft.kv_bytes_per_token == half.target.kv_bytes_per_token
    assert 2 * half.draft.attention_width == half.target.attention_width
