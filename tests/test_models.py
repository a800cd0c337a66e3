"""Models and tokenizers by name: loaded once, checked before any weight is read."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_folders import EOS_ID, save_model, save_tokenizer
from toy_models import VOCAB_SIZE

from experiments import models, plugins
from experiments.config import ModelConfig
from experiments.models import LoadedModels, ModelPool, ModelSource, resolve_device, resolve_dtype
from quant.footprint import bits_per_weight
from quant.plan import WeightsPlan, plan_weights
from quant.weights import base as weights_base
from quant.weights.base import QuantizedWeights

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugins.register_all()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    save_model(folder / "draft", seed=1)
    return folder


def pool_of(root: Path, draft: str | None = None, dtype: torch.dtype = torch.float32) -> ModelPool:
    config = ModelConfig(str(root / "target"), draft=None if draft is None else str(root / draft))
    return ModelPool(config, dtype, CPU)


def options(name: str) -> Any:
    return plugins.default_options("weights", name)


def plugins_with_plans() -> list[str]:
    plugins.register_all()
    return [name for name in plugins.known("weights") if isinstance(options(name), QuantizedWeights)]


def noted_plans(patch: pytest.MonkeyPatch) -> list[Any]:
    """The formats that are planned from now on, again and again where they are."""
    found: list[Any] = []

    def noting(model: Any, weights: Any, *setting: Any) -> WeightsPlan:
        found.append(weights)
        return plan_weights(model, weights, *setting)

    patch.setattr(weights_base, "plan_weights", noting)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_target_has_the_runs_dtype(root: Path, dtype: torch.dtype) -> None:
    model = pool_of(root, dtype=dtype).target(options("plain"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert model.device == CPU


def test_each_model_is_loaded_once_per_format(root: Path) -> None:
    pool = pool_of(root, draft="draft")
    assert pool.target(options("plain")) is pool.target(options("plain"))
    assert pool.draft("plain") is pool.draft("")
    assert pool.draft("plain") is not pool.target(options("plain"))


def test_a_target_that_drafts_for_itself_in_its_own_format_is_one_model(root: Path) -> None:
    pool = pool_of(root)
    assert pool.draft("plain") is pool.target(options("plain"))


def test_a_copy_of_the_target_is_one_whatever_draft_model_there_is(root: Path) -> None:
    pool = pool_of(root, draft="draft")
    assert pool.target_copy("plain") is pool.target(options("plain"))
    assert pool.target_copy("plain") is not pool.draft("plain")


def test_a_self_draft_is_quantized_by_default_and_a_draft_model_is_not(root: Path) -> None:
    assert pool_of(root).default_draft_weights == "int4"
    assert pool_of(root, draft="draft").default_draft_weights == "plain"


def test_a_format_that_cannot_hold_the_model_names_the_setting(root: Path) -> None:
    pool = pool_of(root, dtype=torch.float64)
    for name in ("target", "target_plan"):  # before anything is loaded, too
        with pytest.raises(ValueError, match=r"^weights=bnb_nf4: layer .*dtype=bf16"):
            getattr(pool, name)(options("bnb_nf4"))
    for name in ("draft", "draft_plan"):
        with pytest.raises(ValueError, match=r"^drafter.weights=quanto_int8: layer "):
            getattr(pool, name)("quanto_int8")
    with pytest.raises(
        ValueError, match="unknown weights 'int5'; known: bnb_int8, bnb_nf4, int4, int8, plain"
    ):
        pool.draft("int5")


@pytest.mark.parametrize("name", plugins_with_plans())
def test_what_a_format_chose_is_named_and_planned_once(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For target and draft, and for pools that share their models."""
    planned = noted_plans(monkeypatch)
    loaded = LoadedModels()
    config = ModelConfig(str(root / "target"))
    pools = [ModelPool(config, torch.bfloat16, CPU, loaded) for _ in range(2)]
    targets = [pool.resolved_target(options(name)) for pool in pools]
    drafts = [pool.resolved_draft(name) for pool in pools]
    assert targets[0] == targets[1] == plugins.written_options("weights", drafts[0])
    assert drafts[0] == drafts[1]
    assert "auto" not in dataclasses.asdict(targets[0]).values()
    plans = [plan for pool in pools for plan in (pool.target_plan(targets[0]), pool.draft_plan(drafts[0]))]
    assert all(plan is plans[0] for plan in plans)
    assert plans[0] is pools[0].target_plan(options(name))
    assert planned == [options(name)]


def test_a_plan_is_of_one_model_dtype_and_number_of_threads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, loaded = noted_plans(monkeypatch), LoadedModels()
    int8 = options("bnb_int8")
    for target in ("target", "draft"):
        config = ModelConfig(str(root / target))
        for dtype in (torch.float32, torch.bfloat16):
            plan = ModelPool(config, dtype, CPU, loaded).target_plan(int8)
            assert plan is not None
            assert plan.setting.dtype == dtype
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        ModelPool(config, dtype, CPU, loaded).target_plan(int8)
    finally:
        torch.set_num_threads(before)
    # Both folders have one configuration, so they have one plan.
    assert len(planned) == 3


def test_a_format_without_a_plan_is_itself(root: Path) -> None:
    pool = pool_of(root)
    assert pool.resolved_target(options("plain")) == options("plain")
    assert pool.resolved_draft("plain") == "plain"


def test_a_draft_is_loaded_in_the_format_as_written(root: Path) -> None:
    pool = pool_of(root, dtype=torch.bfloat16)
    coarse, fine = (pool.draft(f"int4 kernel=torch_int4pack group={group}") for group in (128, 32))
    assert bits_per_weight(coarse) != bits_per_weight(fine)
    kept = pool.target_copy("int4 head=false")
    assert type(kept.get_output_embeddings()) is torch.nn.Linear


def test_configurations_are_known_before_weights_are_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", refuse)
    pool = pool_of(root, draft="draft")
    assert pool.target_config.vocab_size == VOCAB_SIZE
    assert set(pool.configs) == {f"model.target={root / 'target'}", f"model.draft={root / 'draft'}"}
    assert pool.tokenizer.eos_token_id == EOS_ID
    assert pool.revision is None


def test_a_draft_of_another_vocabulary_names_the_first_difference(root: Path) -> None:
    save_tokenizer(save_model(root / "words"), prefix="v")
    with pytest.raises(
        ValueError, match="another vocabulary than the target: token 'v0' is 0 there, None here"
    ):
        pool_of(root, draft="words")


def test_a_draft_of_another_width_names_both(root: Path) -> None:
    save_model(root / "narrow", vocab_size=37, eos_token_id=36)
    with pytest.raises(ValueError, match=r"another vocabulary .*logits for 37 tokens there, 61 here"):
        pool_of(root, draft="narrow")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "the folder holds no model"),
        ("no/such/folder", "no such folder, and not a Hugging Face id"),
        ("with blank", "no such folder, and not a Hugging Face id"),
        ("broken", "can't be loaded"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=words) as caught:
        ModelSource("model.draft", name, None).config()
    assert str(caught.value).startswith(f"model.draft={name}: ")
    assert "\n" not in str(caught.value)


def test_a_folder_with_code_of_its_own_is_refused(root: Path) -> None:
    import json

    save_model(root / "remote")
    file = root / "remote" / "config.json"
    config = json.loads(file.read_text())
    config["model_type"] = "not_known_here"
    config["auto_map"] = {"AutoConfig": "code.Config"}
    file.write_text(json.dumps(config))
    (root / "remote" / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="can't be loaded"):
        ModelSource("model.target", str(root / "remote"), None).config()


def test_pickled_weights_are_refused(root: Path) -> None:
    save_model(root / "pickled")
    (weights,) = (root / "pickled").glob("*.safetensors")
    weights.unlink()
    torch.save({}, root / "pickled" / "pytorch_model.bin")
    source = ModelSource("model.target", str(root / "pickled"), None)
    with pytest.raises(ValueError, match="can't be loaded"):
        source.model(torch.float32, CPU)


def test_auto_is_resolved_to_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match="device=cuda: this torch sees no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for native, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("fp64", CPU) == "fp64"


def test_every_dtype_of_the_configuration_is_one_of_torch() -> None:
    from experiments.config import DTYPES

    for name in DTYPES:
        if name != "auto":
            assert models.torch_dtype(name).is_floating_point


def test_a_truncated_weight_file_is_one_line(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(root / "target", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    pool = pool_of(tmp_path)
    with pytest.raises(ValueError, match=r"model\.target=.*can't be loaded") as caught:
        pool.target(plugins.default_options("weights", "plain"))
    assert "\n" not in str(caught.value)


def test_the_bundled_model_has_no_revisions() -> None:
    with pytest.raises(ValueError, match="bundled has no revisions, but revision=main"):
        ModelPool(ModelConfig(revision="main"), torch.float32, torch.device("cpu"))
