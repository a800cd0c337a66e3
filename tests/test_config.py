"""Typed configurations: what composes, what is refused, and with which words."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments import plugins
from experiments.command_line import explain
from experiments.config import CONFIG_DIR, RunConfig, compose_run, from_resolved
from specdec.draft_length.fixed import FixedOptions
from specdec.drafters.draft_model import DraftModelOptions
from specdec.drafters.prompt_lookup import PromptLookupOptions

PRESETS = sorted(file.stem for file in (CONFIG_DIR / "strategy").glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    plugins.register_all()


def refusal(*overrides: str) -> str:
    """The one line that a user reads."""
    with pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught:
        compose_run(overrides)
    line = explain(caught.value)
    assert "\n" not in line
    return line


# --- what composes


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves_to_typed_options(preset: str) -> None:
    config = compose_run([f"strategy={preset}"])
    assert config.strategy == preset
    for group in ("workload", "weights", "kv", "decoding"):
        options = getattr(config, group)
        assert options.name in plugins.known(group)
        assert dataclasses.is_dataclass(options)
    for group in ("drafter", "verifier", "draft_length"):
        assert (getattr(config, group) is not None) == config.decoding.uses_drafter
    assert dataclasses.asdict(config)["strategy"] == preset


def test_the_presets_are_those_of_this_stage() -> None:
    drafted = {"specdec", "prompt_lookup", "suffix", "fallback", "layer_skip"}
    assert set(PRESETS) >= {"baseline", "no_cache", *drafted, "self_nf4", "self_int8", "self_int4"}
    assert set(PRESETS) >= {"int8", "int4", "bnb_int8", "bnb_nf4", "quanto_int8", "quanto_int4"}


def test_the_defaults_are_the_bundled_model_and_the_embedded_prompts() -> None:
    config = compose_run([])
    assert (config.strategy, config.model.target, config.model.draft) == ("specdec", "bundled", None)
    assert (config.workload.name, config.weights.name, config.kv.name) == ("embedded", "plain", "dense")
    assert (config.dtype, config.device, config.seed, config.batch_size) == ("auto", "auto", 0, 1)
    assert config.sampling.temperature == 0


def test_overrides_reach_the_options_of_the_chosen_plugin() -> None:
    config = compose_run(
        ["strategy=prompt_lookup", "drafter.max_ngram=5", "draft_length.max=7", "weights=bnb_nf4", "seed=3"]
    )
    assert isinstance(config.drafter, PromptLookupOptions)
    assert config.drafter.max_ngram == 5
    assert isinstance(config.draft_length, FixedOptions)
    assert config.draft_length.max == 7
    assert (config.weights.name, config.seed) == ("bnb_nf4", 3)


def test_a_group_of_a_preset_can_be_exchanged() -> None:
    config = compose_run(["strategy=specdec", "drafter=prompt_lookup"])
    assert isinstance(config.drafter, PromptLookupOptions)
    other = compose_run(["strategy=prompt_lookup", "drafter=draft_model", "drafter.weights=plain"])
    assert isinstance(other.drafter, DraftModelOptions)
    assert other.drafter.weights == "plain"


def test_the_order_of_overrides_does_not_matter() -> None:
    one = compose_run(["strategy=prompt_lookup", "draft_length.max=2", "drafter.min_ngram=2"])
    assert one == compose_run(["drafter.min_ngram=2", "draft_length.max=2", "strategy=prompt_lookup"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("threads=2", 2),
        ("threads=null", None),
        ("prefill_chunk=16", 16),
        ("model.draft=some/folder", "some/folder"),
        ("sampling.temperature=0.5", 0.5),
        ("measure.repeats=3", 3),
        ("measure.warmup=0", 0),
    ],
)
def test_values_have_their_types(override: str, expected: object) -> None:
    value: Any = compose_run([override])
    for part in override.partition("=")[0].split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


SELF_DRAFTS = ["self_int4", "self_int8", "self_nf4"]


@pytest.mark.parametrize("preset", SELF_DRAFTS)
def test_a_preset_that_drafts_with_the_target_takes_no_draft_model(preset: str) -> None:
    config = compose_run([f"strategy={preset}"])
    assert (config.drafter.model, config.model.draft) == ("target", None)
    assert config.drafter.weights != "plain"
    for order in (
        [f"strategy={preset}", "model.draft=some/folder"],
        ["model.draft=a/b", f"strategy={preset}"],
    ):
        with pytest.raises(ValueError, match=r"^model\.draft=[\w/]+: .*drafter\.model=target") as caught:
            compose_run(order)
        assert "\n" not in str(caught.value)
    # Said otherwise, it is the draft model in that format.
    other = compose_run([f"strategy={preset}", "model.draft=a/b", "drafter.model=draft"])
    assert (other.model.draft, other.drafter.weights) == ("a/b", config.drafter.weights)


@pytest.mark.parametrize("drafter", ["draft_model", "fallback"])
def test_whatever_drafts_with_a_model_may_take_the_target(drafter: str) -> None:
    overrides = ["strategy=specdec", f"drafter={drafter}", "model.draft=some/folder"]
    assert compose_run(overrides).drafter.model == "draft"
    with pytest.raises(ValueError, match=r"model\.draft=some/folder"):
        compose_run([*overrides, "drafter.model=target"])
    with pytest.raises(ValueError, match=r"drafter\.model=copy: expected draft or target"):
        compose_run([*overrides, "drafter.model=copy"])


# --- what is refused


@pytest.mark.parametrize(
    ("overrides", "mentions"),
    [
        (["strategy=x"], ["unknown strategy 'x'", *PRESETS]),
        (["model=x"], ["unknown model 'x'", "bundled"]),
        (["workload=x"], ["unknown workload 'x'", "embedded", "hf", "jsonl", "random"]),
        (["weights=x"], ["unknown weights 'x'", "bnb_nf4", "plain", "int4", "int8", "quanto_int8"]),
        (["kv=x"], ["unknown kv 'x'", "dense"]),
        (["decoding=x"], ["unknown decoding 'x'", "autoregressive", "no_cache", "speculative"]),
        (
            ["drafter=x"],
            ["unknown drafter 'x'", "draft_model", "fallback", "layer_skip", "prompt_lookup", "suffix"],
        ),
        (["verifier=x"], ["unknown verifier 'x'", "block", "match", "token"]),
        (["draft_length=x"], ["unknown draft_length 'x'", "confidence", "cost_model", "fixed"]),
        (["exactness=x"], ["unknown exactness 'x'", "bitwise", "tokens"]),
        (["strategy=baseline", "drafter=x"], ["unknown drafter 'x'", "draft_model", "prompt_lookup"]),
    ],
)
def test_an_unknown_name_lists_the_known_ones(overrides: list[str], mentions: list[str]) -> None:
    line = refusal(*overrides)
    for mention in mentions:
        assert mention in line


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("batchsize=1", ["unknown key 'batchsize'", "did you mean 'batch_size'?", "dtype", "workload"]),
        ("+batchsize=1", ["unknown key 'batchsize'", "batch_size"]),
        ("model.targt=x", ["unknown key 'model.targt'", "did you mean 'target'?", "draft_revision"]),
        ("workload.path=x", ["unknown key 'workload.path'", "limit", "max_new_tokens"]),
        ("drafter.max_ngram=2", ["unknown key 'drafter.max_ngram'", "weights"]),
        ("+drafter.max_ngram=2", ["unknown key 'drafter.max_ngram'", "weights"]),
        ("+measure.a.b=2", ["unknown key 'measure.a'", "repeats", "warmup"]),
    ],
)
def test_an_unknown_key_lists_the_known_ones(override: str, mentions: list[str]) -> None:
    line = refusal(override)
    for mention in mentions:
        assert mention in line


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("batch_size=four", "batch_size", "four"),
        ("batch_size=1.5", "batch_size", "1.5"),
        ("draft_length.max=many", "draft_length.max", "many"),
        ("workload.limit=[1]", "workload.limit", "[1]"),
        ("measure.repeats=null", "measure.repeats", "None"),
        ("sampling.temperature=hot", "sampling.temperature", "hot"),
        ("model=null", "", ""),
    ],
)
def test_a_value_of_the_wrong_type_is_named(override: str, key: str, value: str) -> None:
    line = refusal(override)
    assert key in line
    assert value in line or "not" in line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch_size=0", "batch_size=0: expected at least 1"),
        ("threads=0", "threads=0: expected at least 1"),
        ("prefill_chunk=0", "prefill_chunk=0: expected at least 1"),
        ("measure.repeats=0", "measure.repeats=0: expected at least 1"),
        ("measure.warmup=-1", "measure.warmup=-1: expected at least 0"),
        ("draft_length.max=0", "draft_length.max=0: expected at least 1"),
        ("sampling.temperature=-0.5", "sampling.temperature=-0.5: expected a number >= 0"),
        ("sampling.temperature=nan", "sampling.temperature=nan: expected a number >= 0"),
        ("sampling.temperature=inf", "sampling.temperature=inf: expected a number >= 0"),
        ("dtype=int3", "dtype=int3: expected one of auto, bf16, fp16, fp32, fp64"),
        ("device=tpu", "device=tpu: expected one of auto, cpu, cuda"),
        ("workload.limit=0", "workload.limit=0"),
        ("workload.max_new_tokens=0", "workload.max_new_tokens=0"),
        ("drafter.name=other", "name=other"),
        ("exactness.mode=bits", "exactness.mode=bits: expected one of tokens, bitwise"),
        ("exactness.pass_tokens=8", "exactness.pass_tokens=8 is for exactness=bitwise"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        (["strategy=specdec"], 5),
        (["strategy=prompt_lookup", "draft_length.max=7"], 8),
        (["strategy=baseline"], 1),
    ],
)
def test_passes_of_one_shape_hold_a_whole_draft(overrides: list[str], least: int) -> None:
    config = compose_run([*overrides, "exactness=bitwise", f"exactness.pass_tokens={least}"])
    assert config.exactness.pass_tokens == least
    line = refusal(*overrides, "exactness=bitwise", f"exactness.pass_tokens={least - 1}")
    if least > 1:
        assert (
            f"exactness.pass_tokens={least - 1}: expected at least {least}, one more than draft_length.max"
            in line
        )
    else:
        assert "exactness.pass_tokens=0: expected at least 1" in line


@pytest.mark.parametrize("part", ["drafter=prompt_lookup", "verifier=token", "draft_length=fixed"])
@pytest.mark.parametrize("strategy", ["baseline", "no_cache"])
def test_a_part_that_nothing_would_use_is_refused(strategy: str, part: str) -> None:
    line = refusal(f"strategy={strategy}", part)
    assert f"uses no {part.partition('=')[0]}" in line


@pytest.mark.parametrize("option", ["draft_length.max=3", "drafter.weights=plain", "verifier.x=1"])
def test_an_option_of_a_part_that_is_not_there_is_refused(option: str) -> None:
    group = option.partition(".")[0]
    assert f"this strategy has no {group}" in refusal("strategy=baseline", option)


def test_speculation_without_a_drafter_is_refused() -> None:
    assert "decoding=speculative needs a drafter" in refusal("strategy=baseline", "decoding=speculative")


def test_a_deleted_part_is_named() -> None:
    assert refusal("~weights") == "'weights' has no value"


def test_the_configuration_is_usable_without_hydra() -> None:
    plain = plugins.default_options("weights", "plain")
    config = RunConfig(
        strategy="baseline",
        workload=plugins.default_options("workload", "random"),
        weights=plain,
        kv=plugins.default_options("kv", "dense"),
        decoding=plugins.default_options("decoding", "autoregressive"),
    )
    assert config.weights is plain
    with pytest.raises(ValueError, match="batch_size=0"):
        dataclasses.replace(config, batch_size=0)
    with pytest.raises(ValueError, match="a number >= 0"):
        dataclasses.replace(config.sampling, temperature=math.inf)


# --- from plain values, as they are logged


@pytest.mark.parametrize("preset", PRESETS)
def test_plain_values_become_the_configuration_they_came_from(preset: str) -> None:
    config = compose_run(
        [
            f"strategy={preset}",
            "workload=random",
            "sampling.temperature=0.00001",
            "sampling.logit_bias=[[5,-1.5],[6,-inf]]",
            "sampling.stop=['a b','é']",
            "exactness=bitwise",
            "threads=1",
        ]
    )
    values = dataclasses.asdict(config)
    assert from_resolved(values) == config
    assert from_resolved(json.loads(json.dumps(values))) == config
    assert from_resolved(yaml.safe_load(yaml.safe_dump(values, sort_keys=False))) == config


def test_plain_values_keep_an_external_plugin(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom specdec.kv_stores.dense import DenseOptions\nGROUP = 'kv'\n"
        "@dataclass\nclass Mine(DenseOptions):\n    bits: int = 8\n"
    )
    values = dataclasses.asdict(compose_run([f"plugin={file}", "kv=mine", "kv.bits=4"]))
    again = from_resolved(values)
    assert (type(again.kv).__name__, again.kv.name, again.kv.bits) == ("Mine", "mine", 4)
    assert dataclasses.asdict(again) == values


def test_a_setting_that_an_older_version_did_not_log_has_its_default() -> None:
    config = compose_run(["strategy=prompt_lookup"])
    values = dataclasses.asdict(config)
    del values["prefill_chunk"], values["measure"]["warmup"], values["workload"]["limit"], values["sampling"]
    assert from_resolved(values) == config


def resolved_with(path: str, value: object) -> dict[str, Any]:
    """A preset's plain values with one of them replaced, or removed where the value is `...`."""
    values = dataclasses.asdict(compose_run(["strategy=specdec"]))
    *sections, key = path.split(".")
    node = values
    for section in sections:
        node = node[section]
    if value is ...:
        del node[key]
    else:
        node[key] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "mentions"),
    [
        ("batchsize", 1, ["unknown key 'batchsize'", "batch_size", "workload"]),
        ("model.targt", "x", ["unknown key 'model.targt'", "draft_revision", "target"]),
        ("drafter.max_ngram", 2, ["unknown key 'drafter.max_ngram'", "weights"]),
        ("kv.name", "x", ["unknown kv 'x'", "dense"]),
        ("drafter.name", "x", ["unknown drafter 'x'", "draft_model", "prompt_lookup"]),
        ("drafter.name", ..., ["'drafter.name' has no value", "draft_model", "prompt_lookup"]),
        ("weights", "plain", ["weights=plain: expected the settings of weights"]),
        ("measure", 3, ["measure=3: expected the settings of measure"]),
        ("decoding", None, ["'decoding' has no value"]),
        ("strategy", ..., ["'strategy' has no value"]),
        ("batch_size", 0, ["batch_size=0: expected at least 1"]),
        ("draft_length.max", 0, ["draft_length.max=0: expected at least 1"]),
        ("drafter", None, ["decoding=speculative needs a drafter"]),
        ("plugin", "no/such.py", ["plugin=no/such.py: no such file"]),
    ],
)
def test_plain_values_that_fit_nothing_are_named(path: str, value: object, mentions: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        from_resolved(resolved_with(path, value))
    line = str(caught.value)
    assert "\n" not in line
    for mention in mentions:
        assert mention in line
