"""Weight formats: each layer computes what its weights are rounded to; what is replaced, kept, padded, refused."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_models import random_prompts, tiny_model
from toy_weights import FORMATS, bf16_model, converted_layer, linear_of, oracle

from experiments import plugins
from quant.kernels import choice, nf4
from quant.kernels.base import QuantizedLinear
from quant.kernels.choice import Candidate, choose, why_unfit
from quant.kernels.int8pack import Int8PackLinear
from quant.kernels.lookup import RowLookup
from quant.kernels.onednn_u8s8 import OneDnnLinear, rounded_tokens
from quant.weights.base import QuantizedWeights
from quant.weights.bnb_int8 import BnbInt8Weights
from quant.weights.int4 import Int4Weights
from quant.weights.int8 import Int8Weights
from quant.weights.plain import PlainWeights
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKOUT = Path(__file__).resolve().parents[1]
# Rounded to bf16 once or twice; beside that LLM.int8 and oneDNN round activations to 8 bits.
LAYER_ERROR = dict.fromkeys(FORMATS, 2**-8) | {"bnb_int8": 2**-6, "int8_onednn": 2**-6}


def test_plain_weights_are_the_model_itself() -> None:
    model = bf16_model()
    before = copy.deepcopy(model.state_dict())
    assert PlainWeights().convert(model) is model
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert PlainWeights.lossless
    assert not any(known.weights.lossless for known in FORMATS.values())
    assert PlainWeights().plan(model, torch.device("cpu"), torch.bfloat16) is None


# --- one layer


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_layer_is_the_float_layer_of_its_dequantized_weights(label: str, rows: int, bias: bool) -> None:
    for inputs, outputs in ((128, 64), (256, 48), (72, 33), (20, 1)):  # the last ones are padded
        linear = linear_of(outputs, inputs, bias=bias)
        weight = oracle(label, linear)
        error = (weight - linear.weight.double()).norm() / linear.weight.double().norm()
        assert (2e-3 < error < 0.02) if FORMATS[label].bits == 8 else (0.02 < error < 0.2)
        x = torch.randn(1, rows, inputs, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
        layer = converted_layer(label, linear)
        assert isinstance(layer, QuantizedLinear)
        check_products(layer, weight, linear.bias, x, LAYER_ERROR[label])


def check_products(layer: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor, allowed: float) -> None:
    """Against float64 products with the weights that the layer stands for."""
    with torch.no_grad():
        found = layer(x)
    assert (found.dtype, found.shape) == (x.dtype, (*x.shape[:-1], weight.shape[0]))
    expected = x.double() @ weight.T + (0.0 if bias is None else bias.double())
    scale = (x.double().abs() @ weight.abs().T).max()
    assert float((found.double() - expected).abs().max() / scale) < allowed


@pytest.mark.parametrize("label", ["int8", "int8_onednn", "int4", "bnb_nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_multiplied_too(label: str, dtype: torch.dtype) -> None:
    linear = linear_of(48, 72, bias=True, dtype=dtype)
    x = torch.randn(2, 3, 72, dtype=dtype)
    check_products(converted_layer(label, linear), oracle(label, linear), linear.bias, x, LAYER_ERROR[label])


@pytest.mark.parametrize("label", FORMATS)
def test_activations_may_be_part_of_a_larger_tensor(label: str) -> None:
    """As the last positions of several rows are, which the head gets: the kernels want them side by side."""
    linear = linear_of(32, 64)
    layer, weight = converted_layer(label, linear), oracle(label, linear)
    whole = torch.randn(3, 5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))
    wide = torch.randn(64, 3, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    for x in (whole[:, -1:], whole[:, 1:3], whole[0, 1:3], wide.T):
        check_products(layer, weight, None, x, LAYER_ERROR[label])


@pytest.mark.parametrize("label", FORMATS)
def test_what_is_stored_does_not_keep_the_float_weights_alive(label: str) -> None:
    """As the history of a gradient would."""
    layer = converted_layer(label, nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    assert not any(t.requires_grad for t in (*layer.buffers(), *layer.parameters()))


def test_tokens_are_rounded_one_by_one() -> None:
    x = torch.tensor([[1.0, -0.5, 0.25], [0.0, 0.0, 0.0], [-254.0, 127.0, 1.0]])
    codes, steps = rounded_tokens(x)
    assert codes.tolist() == [[255, 65, 160], [128, 128, 128], [1, 192, 129]]
    assert torch.allclose((codes.double() - 128) * steps, x.double(), atol=1.01)


def test_our_call_of_bitsandbytes_kernel_gives_what_its_own_module_gives() -> None:
    import bitsandbytes

    if not nf4.is_native():
        pytest.skip("needs bf16 instructions")
    linear = linear_of(64, 128, bias=True)
    theirs = bitsandbytes.nn.Linear4bit(
        128, 64, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=False
    )
    theirs.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data.clone(), quant_type="nf4", compress_statistics=False, module=theirs
    )
    theirs.bias = linear.bias
    theirs = theirs.to("cpu").eval()
    x = torch.randn(1, 7, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(converted_layer("bnb_nf4", linear)(x), theirs(x))


# --- a whole model


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_is_the_float_model_of_its_dequantized_weights(label: str, tied: bool) -> None:
    quantized = FORMATS[label].weights.convert(bf16_model(tied=tied))
    reference, plain = bf16_model(tied=tied), bf16_model(tied=tied)
    for name, module in quantized.named_modules(remove_duplicate=False):  # a tied head has two names
        if isinstance(module, QuantizedLinear) and not name.endswith("embed_tokens.head"):
            layer: Any = reference.get_submodule(name)
            layer.weight.data = oracle(label, layer).to(layer.weight.dtype)
    if tied:
        reference.tie_weights()
    tokens = torch.tensor(random_prompts([12]))
    with torch.no_grad():
        found, expected = quantized(tokens).logits.float(), reference(tokens).logits.float()
        without = plain(tokens).logits.float()
    # bf16 activations, and weights rounded to bf16; far below what the quantization itself does at 4 bits.
    assert (found - expected).norm() / expected.norm() < 0.05
    if FORMATS[label].bits == 4:
        assert (found - expected).norm() < 0.2 * (without - expected).norm()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt"])
def test_a_tied_embedding_looks_up_the_rows_that_the_head_multiplies_by(label: str, family: str) -> None:
    """Also where a family scales what it looked up (Gemma), and with a vocabulary that is no multiple of anything."""
    model, plain = bf16_model(family, hidden_size=32), bf16_model(family, hidden_size=32)
    float_head = plain.get_output_embeddings()
    weight = oracle(label, float_head)
    FORMATS[label].weights.convert(model)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, RowLookup)
    assert embedding.head is model.get_output_embeddings()
    ids = torch.tensor([[0, 60, 33, 1]])
    table: Any = plain.get_input_embeddings()
    table.weight.data = weight.to(torch.bfloat16)
    assert torch.allclose(embedding(ids).double(), table(ids).double(), rtol=2**-7, atol=1e-6)
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("label", FORMATS)
def test_gpt2s_own_kind_of_linear_layer_is_quantized_too(label: str) -> None:
    model, plain = bf16_model("gpt2", tied=False), bf16_model("gpt2", tied=False)
    FORMATS[label].weights.convert(model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert "Conv1D" not in kinds.values()
    tokens = torch.tensor(random_prompts([9]))
    with torch.no_grad():
        found, expected = model(tokens).logits.float(), plain(tokens).logits.float()
    assert (found - expected).norm() / expected.norm() < (0.1 if FORMATS[label].bits == 8 else 0.6)


@pytest.mark.parametrize("label", FORMATS)
def test_what_is_to_be_kept_is_kept(label: str) -> None:
    weights = replace(FORMATS[label].weights, head=False, keep=["*.mlp.*", "model.layers.1.self_attn.q_proj"])
    model = weights.convert(bf16_model())
    quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert quantized == {
        f"model.layers.{layer}.self_attn.{name}_proj"
        for layer in (0, 1)
        for name in "qkvo"
        if (layer, name) != (1, "q")
    }
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Scaled(nn.Linear):
    """Not a plain linear layer, though it inherits from one."""


@pytest.mark.parametrize("label", ["int8", "bnb_nf4"])
def test_layers_of_another_kind_are_kept(label: str) -> None:
    model: Any = nn.Sequential(linear_of(32, 64), nn.ReLU(), Scaled(32, 32), linear_of(32, 32))
    FORMATS[label].weights.convert(model)
    assert [isinstance(module, QuantizedLinear) for module in model] == [True, False, False, True]


@pytest.mark.parametrize("label", FORMATS)
def test_each_format_converts_in_place_and_still_computes(label: str) -> None:
    model = bf16_model()
    assert FORMATS[label].weights.convert(model) is model
    tokens = torch.tensor(random_prompts([5]))
    with torch.no_grad():
        first, second = model(tokens).logits, model(tokens).logits
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not any(module.training for module in model.modules())


def test_the_last_positions_of_several_rows_reach_a_quantized_head() -> None:
    model = FORMATS["int4"].weights.convert(bf16_model(tied=False))
    runner = ModelRunner(model, 3, 8)
    runner.prefill([[1, 2]] * 3, [0, 1, 2])
    assert runner.decode(torch.tensor([[3, 4]] * 3)).shape == (3, 61)


# --- refusals


@pytest.mark.parametrize("label", FORMATS)
def test_a_model_without_linear_layers_is_refused(label: str) -> None:
    model: Any = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match=r"^this model has no linear layer to quantize$"):
        FORMATS[label].weights.convert(model)


@pytest.mark.parametrize("label", FORMATS)
def test_a_pattern_that_fits_no_layer_is_refused_before_anything_is_touched(label: str) -> None:
    model = bf16_model()
    with pytest.raises(
        ValueError, match=r"weights.keep=\*.w_proj: no linear layer .* model.layers.\*.self_attn"
    ):
        replace(FORMATS[label].weights, keep=["*.w_proj"]).convert(model)
    with pytest.raises(ValueError, match=r"'llama' model .* \(kept: weights.keep; weights.head=false\)"):
        replace(FORMATS[label].weights, keep=["model.*"], head=False).convert(model)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 16}, "weights.group=16: expected one of 32, 64, 128, or 0"),
        ({"kernel": "x"}, "weights.kernel=x: expected one of auto, torch_int4pack, bnb_nf4"),
        ({"kernel": "bnb_nf4", "group": 32}, "has blocks of 64 and no offset"),
        ({"kernel": "bnb_nf4", "symmetric": True}, "has blocks of 64 and no offset"),
    ],
)
def test_options_of_int4_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int4Weights(**options)


def test_options_of_8_bits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"weights.kernel=x: expected one of auto, torch_int8pack, onednn_u8s8"
    ):
        Int8Weights(kernel="x")
    with pytest.raises(ValueError, match=r"weights.threshold=-1: expected a number >= 0"):
        BnbInt8Weights(threshold=-1)


@pytest.mark.parametrize(
    ("weights", "advice"),
    [
        (Int8Weights(kernel="onednn_u8s8"), "weights.kernel=auto"),
        (Int4Weights(group=64), "weights.kernel=auto"),
    ],
)
def test_a_kernel_of_the_cpu_is_refused_on_cuda(weights: QuantizedWeights, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"(runs on|are for) a CPU.*{advice}"):
        weights.plan(bf16_model(), torch.device("cuda"), torch.bfloat16)


def test_on_cuda_int8_and_int4_mean_bitsandbytes() -> None:
    for weights, kernel in ((Int8Weights(), "LLM.int8"), (Int4Weights(), "nf4 (CUDA)")):
        plan = weights.plan(bf16_model(), torch.device("cuda"), torch.bfloat16)
        assert plan.kernels == [f"bitsandbytes {kernel}"]


@pytest.mark.parametrize("label", ["bnb_int8", "bnb_nf4", "quanto_int8", "quanto_int4"])
def test_a_dtype_that_a_library_does_not_know_is_refused_by_layer(label: str) -> None:
    with pytest.raises(ValueError, match=r"^layer model.layers.0.self_attn.q_proj \(64 x 64\): .*dtype=bf16"):
        FORMATS[label].weights.convert(tiny_model(hidden_size=64, dtype=torch.float64))


def test_quantos_4_bits_in_float32_need_a_compiler_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, model = FORMATS["quanto_int4"].weights, tiny_model(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"tied|looked up"):
        weights.convert(tiny_model(dtype=torch.float32, tie_word_embeddings=True))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"there is no c\+\+ or no ninja; use dtype=bf16, which needs none"):
        weights.convert(model)


# --- the choice of a kernel


def candidate(name: str, make: Any, factor: float = 1.0) -> Candidate:
    return Candidate(name, make, lambda linear: linear.weight * factor)


class Broken(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        raise RuntimeError("no such\noperator")


class Slow(Int8PackLinear):
    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(50):
            super().forward(inputs)
        return super().forward(inputs)


def test_a_kernel_that_is_missing_or_wrong_is_out() -> None:
    assert why_unfit(candidate("broken", Broken), torch.float32) == "RuntimeError: no such operator"
    assert why_unfit(candidate("right", Int8PackLinear), torch.float32) == ""
    assert "results are wrong by" in why_unfit(candidate("wrong", Int8PackLinear, 2.0), torch.float32)


def test_the_cheapest_kernel_is_chosen_once_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_chosen", {})
    candidates = [
        candidate("slow", Slow),
        candidate("fast", Int8PackLinear),
        candidate("broken", Broken),
    ]
    found = choose(candidates, (64, 64), torch.bfloat16)
    assert (found.name, set(found.costs_us), set(found.unfit)) == ("fast", {"slow", "fast"}, {"broken"})
    assert choose(candidates, (64, 64), torch.bfloat16) is found
    assert str(found).startswith("at 1/5 tokens slow ")
    assert str(found).endswith("broken out: RuntimeError: no such operator")
    assert choice.seconds_spent() == found.seconds > 0
    alone = choose(candidates[2:0:-1], (64, 64), torch.bfloat16)
    assert (alone.name, alone.costs_us) == ("fast", {})


@pytest.mark.parametrize("weights", [Int8Weights(), Int4Weights(), BnbInt8Weights()])
def test_what_was_chosen_can_be_asked_for_by_name(weights: QuantizedWeights) -> None:
    for device in ("cpu", "cuda"):
        plan = weights.plan(bf16_model(), torch.device(device), torch.bfloat16)
        resolved = weights.resolved(plan)
        assert getattr(resolved, "kernel", "") != "auto"
        assert resolved.plan(bf16_model(), torch.device(device), torch.bfloat16).rows == plan.rows


def test_near_ties_go_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"first": [10.0, 10.0], "second": [9.0, 9.5], "third": [20.0, 3.0]}
    candidates = [candidate(name, Int8PackLinear) for name in costs]
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_costs_us", lambda fit, *_: {one.name: costs[one.name] for one in fit})
    assert choose(candidates[:2], (64, 64), torch.bfloat16).name == "first"
    assert choose(candidates, (64, 64), torch.bfloat16).name == "third"


def test_without_any_kernel_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no kernel .* works on this machine .*broken: RuntimeError.*plain"):
        choose([candidate("broken", Broken)], (64, 64), torch.float64)


def test_the_kernels_of_int8_are_known_to_be_right_here() -> None:
    for known in (Int8Weights(), Int4Weights()):
        plan = known.plan(bf16_model(), torch.device("cpu"), torch.bfloat16)
        assert " out: " not in plan.choice
        assert len(plan.kernels) == 1


# --- plug-ins


def test_every_format_of_the_folder_is_tested_here() -> None:
    plugins.register_all()
    known = {type(plugins.default_options("weights", name)).__name__ for name in plugins.known("weights")}
    assert known - {"PlainWeights"} == {type(known.weights).__name__ for known in FORMATS.values()}


def test_importing_bitsandbytes_never_asks_a_hub_for_code(tmp_path: Path) -> None:
    """A package `kernels` on the path stands for the one that downloads; in a process that has not imported yet."""
    (tmp_path / "kernels.py").write_text(
        "def get_kernel(*_, **__):\n    raise SystemExit('hub code would run')\n"
    )
    program = (
        "import sys; from quant._bitsandbytes import bitsandbytes; "
        f"sys.path.insert(0, {str(tmp_path)!r}); print(bitsandbytes().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "bitsandbytes"), done.stderr


def test_onednn_layers_without_a_table_have_no_rows() -> None:
    with pytest.raises(ValueError, match="kept no rows"):
        OneDnnLinear(linear_of(32, 64)).rows(torch.tensor([1]))
