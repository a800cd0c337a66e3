"""Plans of weights: made of shapes alone, and what a conversion then really does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import tiny_model
from toy_weights import FORMATS, bf16_model, linear_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments import weights_report
from experiments.load import ForeignLoad
from quant.footprint import quantized_share, stored_bytes
from quant.kernels.base import QuantizedLinear
from quant.plan import LinearSite, PlanRow, Setting, Storage, WeightsPlan, linear_sites

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "gemma3_text", "phi3", "gpt_neox", "opt")


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)


def buffer_bytes(model: nn.Module) -> int:
    buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in model.buffers()}
    return sum(buffers.values())


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_becomes_what_the_plan_said(label: str, family: str, tied: bool) -> None:
    weights = FORMATS[label].weights
    model = bf16_model(family, tied=tied, hidden_size=32)
    buffers = buffer_bytes(model)
    plan = weights.plan(skeleton(model), CPU, torch.bfloat16)
    weights.convert(model)
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantizedLinear) and not name.endswith(".head")
    }
    assert {row.site.name for row in plan.quantized} == set(layers)
    for row in plan.quantized:
        layer = layers[row.site.name]
        assert row.storage is not None
        assert (layer.out_features, layer.in_features) == row.site.shape
        assert (layer.kernel, layer.row_invariant) == (row.storage.kernel, row.storage.row_invariant)
        own = stored_bytes(layer) - sum(t.nbytes for n, t in layer.named_parameters() if n.endswith("bias"))
        assert own == row.storage.stored_bytes
    assert plan.kernels == [FORMATS[label].kernel]
    assert plan.stored_bytes == stored_bytes(model) - buffers
    assert plan.quantized_share == quantized_share(model)
    assert plan.bits_per_weight == 8 * plan.stored_bytes / plan.num_parameters


@pytest.mark.parametrize("label", ["int8", "bnb_nf4"])
def test_kept_layers_are_in_the_plan_with_the_reason(label: str) -> None:
    weights = replace(FORMATS[label].weights, head=False, keep=["*.0.mlp.up_proj"])
    plan = weights.plan(skeleton(bf16_model()), CPU, torch.bfloat16)
    reasons = {row.site.name: row.reason for row in plan.rows if row.storage is None}
    assert reasons == {"lm_head": "weights.head=false", "model.layers.0.mlp.up_proj": "weights.keep"}
    kept = next(row for row in plan.rows if row.site.name == "lm_head")
    assert kept.bits_per_weight == 16
    assert len(plan.quantized) == len(plan.rows) - 2 == 13


def test_padding_is_said() -> None:
    plan = FORMATS["bnb_nf4"].weights.plan(bf16_model(hidden_size=96), CPU, torch.bfloat16)
    notes = {row.site.pattern: row.reason for row in plan.rows}
    assert notes["model.layers.*.self_attn.q_proj"] == "padded to 96 x 128"
    assert notes["lm_head"] == "padded to 64 x 128"
    wide = FORMATS["quanto_int4"].weights.plan(linear_of(576, 576), CPU, torch.bfloat16)
    (row,) = wide.rows
    assert row.storage is not None
    assert (row.storage.kernel, row.reason) == ("quanto: torch int4pack", "padded to 576 x 640")


@pytest.mark.parametrize("label", ["int4", "bnb_nf4"])
def test_products_in_another_dtype_than_the_models_are_said(label: str) -> None:
    found = {
        dtype: [row.reason for row in FORMATS[label].weights.plan(linear_of(576, 576), CPU, dtype).rows]
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert found == {torch.bfloat16: [""], torch.float32: ["products in bfloat16"]}


def test_which_kernel_quanto_executes_is_said_for_other_dtypes_too() -> None:
    (row,) = FORMATS["quanto_int8"].weights.plan(linear_of(576, 576), CPU, torch.float32).rows
    assert row.storage is not None
    assert row.storage.kernel == "quanto: dequantized at each product"
    assert row.reason == "slow: no kernel for this dtype or device"


# --- sites


def test_sites_of_a_model_on_the_meta_device_are_those_of_the_real_one() -> None:
    for family in FAMILIES:
        for tied in (True, False):
            model = tiny_model(family, tie_word_embeddings=tied)
            sites = linear_sites(skeleton(model))
            assert sites == linear_sites(model)
            (head,) = [site for site in sites if site.is_head]
            assert bool(head.embedding) is tied


def test_two_linear_layers_with_one_weight_are_left() -> None:
    model: Any = nn.Sequential(linear_of(8, 8), linear_of(8, 8), linear_of(8, 8))
    model[1].weight = model[0].weight
    problems = [site.problem for site in linear_sites(model)]
    assert problems == ["shares its weight with 1", "shares its weight with 0", ""]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.12.mlp.up_proj", "model.layers.*.mlp.up_proj"),
        ("0", "*"),
        ("h2.w1.3.4", "h2.w1.*.*"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_of_one_kind(name: str, pattern: str) -> None:
    assert LinearSite(name, 1, 1).pattern == pattern


# --- what is printed of it


def plan_of(*row_invariant: bool | None) -> WeightsPlan:
    rows = [
        PlanRow(LinearSite(f"a.{index}.w", 4, 8), Storage(f"k{index % 2}", 20, known, "slow"))
        for index, known in enumerate(row_invariant)
    ]
    kept = PlanRow(LinearSite("head", 4, 8, True, "table"), None, 64, "weights.head=false")
    return WeightsPlan([*rows, kept], 200, 400, Setting(CPU, torch.bfloat16, (4, 8)))


def test_totals_by_hand() -> None:
    plan = plan_of(True, True, True)
    assert plan.kernels == ["k0", "k1"]
    assert plan.quantized_share == 3 * 32 / 200
    assert plan.stored_bytes == 400 - 3 * (64 - 20)
    assert [row.bits_per_weight for row in plan.rows] == [5, 5, 5, 16]
    assert weights_report.totals(plan) == (
        "48.0 % of 200 parameters quantized, 10.72 bits a weight with scales; "
        "a token's product doesn't depend on what else is in its pass"
    )


def test_the_table_has_a_line_for_layers_of_one_kind() -> None:
    assert weights_report.rows(plan_of(True, True, True)) == [
        weights_report.HEADING,
        ["a.*.w", "2", "4 x 8", "k0", "5.00", "slow"],
        ["a.*.w", "1", "4 x 8", "k1", "5.00", "slow"],
        ["head", "1", "4 x 8", "plain", "16.00", "weights.head=false"],
    ]


@pytest.mark.parametrize(
    ("layers", "whole"),
    [((True, True), True), ((True, False), False), ((True, None), None), ((None, False), False), ((), None)],
)
def test_one_layer_that_depends_on_batch_mates_makes_the_model_so(
    layers: tuple[bool | None, ...], whole: bool | None
) -> None:
    plan = plan_of(*layers)
    assert plan.row_invariant is whole
    line = weights_report.exactness_line({"target": plan, "draft": plan_of(False)})
    assert bool(line) is (whole is not True)
    if line:
        assert "no exactness is claimed" in line
    assert weights_report.exactness_line({"target": None}) == ""


def test_a_choice_beside_a_busy_process_is_doubted() -> None:
    chosen, given = (replace(plan_of(True), choice=choice) for choice in ("at 1/5 tokens a 1/2", ""))
    quiet, busy = ForeignLoad(0.1), ForeignLoad(1.7)
    assert weights_report.doubt_line(quiet, [chosen]) == ""
    assert weights_report.doubt_line(busy, [None, given]) == ""
    assert "1.7 cores busy while kernels were timed" in weights_report.doubt_line(busy, [None, chosen])


def test_first_use_is_told_where_it_took_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_report, "seconds_spent", lambda: 0.26)
    assert weights_report.first_use_line(1.04) == (
        "first use, not in any timing: choosing kernels 0.26 s, converting and packing weights 1.04 s"
    )
    monkeypatch.setattr(weights_report, "seconds_spent", lambda: 0.0)
    assert weights_report.first_use_line(0.001) == ""
