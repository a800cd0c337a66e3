"""A strategy's two references: which arm is which, and when two of them are one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from toy_folders import save_model

from experiments import plugins
from experiments.config import ModelConfig, compose_run
from experiments.models import ModelPool
from experiments.strategy import Arms, EngineSettings, arms_of, build_parts
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.progress import StopTokens
from specdec.types import SamplingParams


def arms(*overrides: str) -> Arms:
    return arms_of(compose_run(overrides))


def names(found: Arms) -> tuple[str, str, str]:
    return found.strategy.name, found.twin.name, found.plain.name


def test_a_baseline_is_its_own_reference() -> None:
    found = arms("strategy=baseline")
    assert names(found) == ("baseline", "baseline", "baseline")
    assert found.distinct == [found.strategy]


@pytest.mark.parametrize("strategy", ["no_cache", "specdec", "prompt_lookup"])
def test_over_plain_weights_twin_and_plain_are_one_reference(strategy: str) -> None:
    found = arms(f"strategy={strategy}")
    assert names(found) == (strategy, "reference", "reference")
    assert len(found.distinct) == 2
    assert found.twin.decoding.name == "autoregressive"
    assert (found.twin.drafter, found.twin.verifier, found.twin.draft_length) == (None, None, None)


def test_quantized_decoding_is_its_own_twin_but_not_plain() -> None:
    found = arms("strategy=baseline", "weights=bnb_nf4")
    assert names(found) == ("baseline", "baseline", "plain")
    assert (found.strategy.weights.name, found.plain.weights.name) == ("bnb_nf4", "plain")


def test_quantized_speculation_has_two_references() -> None:
    found = arms("strategy=prompt_lookup", "weights=bnb_nf4")
    assert names(found) == ("prompt_lookup", "twin", "plain")
    assert [arm.weights.name for arm in found.distinct] == ["bnb_nf4", "bnb_nf4", "plain"]
    assert found.twin.decoding == found.plain.decoding
    assert len(found.distinct) == 3


@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_bitwise_passes_are_those_of_strategy_and_twin_alone(weights: str) -> None:
    """Speed-ups are quoted against plain decoding as anyone would run it."""
    overrides = ("strategy=prompt_lookup", f"weights={weights}", "draft_length.max=6")
    found = arms(*overrides, "exactness=bitwise", "exactness.pass_tokens=9")
    assert names(found) == ("prompt_lookup", "twin", "plain")
    assert (found.strategy.pass_tokens, found.twin.pass_tokens, found.plain.pass_tokens) == (9, 9, None)
    by_itself = arms(*overrides, "exactness=bitwise")
    assert by_itself.strategy.pass_tokens is not None
    assert by_itself.strategy.pass_tokens >= 7
    assert by_itself.twin.pass_tokens == by_itself.strategy.pass_tokens
    assert (by_itself.plain.pass_tokens, arms(*overrides).strategy.pass_tokens) == (None, None)


def test_a_bitwise_baseline_is_its_own_twin_but_not_plain() -> None:
    found = arms("strategy=baseline", "exactness=bitwise", "exactness.pass_tokens=4")
    assert names(found) == ("baseline", "baseline", "plain")
    assert (found.twin.pass_tokens, found.plain.pass_tokens) == (4, None)


@pytest.mark.parametrize(
    ("name", "key_bits", "value_bits"), [("kv_int8", 8, 8), ("kv_int4", 4, 4), ("kv_int2", 2, 2)]
)
def test_quantized_caches_by_strategy_and_by_override(name: str, key_bits: int, value_bits: int) -> None:
    found = arms(f"strategy={name}")
    assert names(found) == (name, name, "plain")
    assert (found.strategy.kv.name, found.plain.kv.name) == (name, "dense")
    assert (found.strategy.kv.key_bits, found.strategy.kv.value_bits) == (key_bits, value_bits)
    combined = arms("strategy=prompt_lookup", "weights=int8", f"kv={name}", "kv.key_bits=8")
    assert names(combined) == ("prompt_lookup", "twin", "plain")
    assert combined.twin.kv == combined.strategy.kv
    assert (combined.twin.kv.key_bits, combined.twin.weights.name) == (8, "int8")
    assert not combined.strategy.declares_lossless


def test_a_store_is_told_the_longest_pass(tmp_path: Path) -> None:
    settings = EngineSettings(1, 80, SamplingParams(), frozenset(), 0, StopTokens(), prefill_chunk=None)
    save_model(tmp_path / "target")
    pool = ModelPool(ModelConfig(str(tmp_path / "target")), torch.float32, torch.device("cpu"))

    def longest(*overrides: str) -> int | None:
        arm = arms_of(compose_run(["strategy=prompt_lookup", "kv=kv_int4", *overrides])).strategy
        return build_parts(arm, pool, settings).runner.cache.store.shape.longest_pass  # type: ignore[attr-defined]

    assert longest() == 5
    assert longest("draft_length.max=7", "kv.tail=8") == 8
    assert longest("strategy=kv_int4") == 1
    with pytest.raises(ValueError, match=r"kv.tail=7: .* up to 8 tokens .*: at least 8"):
        longest("draft_length.max=7", "kv.tail=7")


def test_a_preset_that_was_overridden_is_judged_by_its_parts() -> None:
    assert names(arms("strategy=no_cache", "decoding=autoregressive")) == ("no_cache",) * 3


def test_a_configuration_outlives_the_next_one() -> None:
    """Composing again must not make the first configuration's parts differ from their own kind."""
    first = compose_run(["strategy=baseline"])
    plugins.register_all()
    compose_run(["strategy=specdec"])
    assert len(arms_of(first).distinct) == 1


def test_arms_are_told_apart_by_any_option() -> None:
    found = arms("strategy=prompt_lookup").strategy
    assert found.same_parts(dataclasses.replace(found, name="other"))
    longer = arms("strategy=prompt_lookup", "draft_length.max=5").strategy
    assert not found.same_parts(longer)


@pytest.mark.parametrize(
    ("overrides", "lossless"),
    [
        (["strategy=baseline"], True),
        (["strategy=no_cache"], True),
        (["strategy=specdec"], True),
        (["strategy=specdec", "drafter.weights=bnb_nf4"], True),
        (["strategy=baseline", "weights=bnb_nf4"], False),
        (["strategy=prompt_lookup", "weights=bnb_nf4"], False),
    ],
)
def test_lossless_is_what_the_parts_declare(overrides: list[str], lossless: bool) -> None:
    assert arms(*overrides).strategy.declares_lossless is lossless


def test_a_verifier_that_declares_nothing_is_not_lossless() -> None:
    found = arms("strategy=specdec").strategy

    class Hopeful(type(found.verifier)):  # type: ignore[misc]
        lossless = False

    assert not dataclasses.replace(found, verifier=Hopeful()).declares_lossless


def test_the_draft_model_reads_prompts_in_the_same_chunks(tmp_path: Path) -> None:
    settings = EngineSettings(1, 40, SamplingParams(), frozenset(), 0, StopTokens(), prefill_chunk=4)
    arm = arms_of(compose_run(["strategy=specdec", "drafter.weights=plain"])).strategy
    save_model(tmp_path / "target")
    pool = ModelPool(ModelConfig(str(tmp_path / "target")), torch.float32, torch.device("cpu"))
    parts = build_parts(arm, pool, settings)
    assert isinstance(parts.drafter, DraftModelDrafter)
    assert parts.drafter.runner.prefill_chunk == parts.runner.prefill_chunk == 4
