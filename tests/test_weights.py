"""Weight formats: what is replaced, what is left alone, what is refused, and that NF4 computes what it stores."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_models import VOCAB_SIZE, random_prompts, tiny_model
from transformers import PreTrainedModel

from experiments import plugins
from quant.primitives import Quantized, quantize_affine, quantize_rows
from quant.weights.base import WeightsOptions, replace_linears
from quant.weights.bnb_nf4 import BnbNf4Weights
from quant.weights.plain import PlainWeights
from quant.weights.torch_int4 import ZERO_CODE, Int4Linear, TorchInt4Weights
from quant.weights.torch_int8 import Int8Linear, TorchInt8Weights
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKOUT = Path(__file__).resolve().parents[1]


def model_of(*, tied: bool = True, **sizes: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": tied} | sizes
    return tiny_model(dtype=torch.bfloat16, **sizes)


def dequantized(layer: Any) -> Tensor:
    """The weights an NF4 layer stands for. Before its first forward: that repacks them, and this reads garbage."""
    import bitsandbytes

    weight = layer.weight
    return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)


# --- replacing layers


class Scaled(nn.Linear):
    """Not a plain linear layer, though it inherits from one."""


def test_linear_layers_are_replaced_with_their_names() -> None:
    inner = nn.Sequential(nn.Linear(4, 2), Scaled(2, 2))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), inner)
    seen = []

    def make(name: str, linear: nn.Linear) -> nn.Module | None:
        seen.append(name)
        return nn.Identity() if linear.out_features == 2 else None

    assert replace_linears(model, make) == 1
    assert seen == ["0", "2.0"]
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Sequential]
    assert [type(module) for module in inner] == [nn.Identity, Scaled]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_left_alone(tied: bool) -> None:
    model = model_of(tied=tied)
    names = []
    replace_linears(model, lambda name, linear: names.append(name))
    assert len(names) == 7 * 2 + (not tied)
    assert ("lm_head" in names) is not tied


def test_plain_weights_are_the_model_itself() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    assert PlainWeights().convert(model) is model
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert PlainWeights.lossless
    assert not any(quantized.lossless for quantized in (BnbNf4Weights, TorchInt8Weights, TorchInt4Weights))


# --- NF4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_an_nf4_layer_is_the_float_layer_of_its_dequantized_weights(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 64, bias=bias, dtype=torch.bfloat16))
    original = model[0].weight.data.clone()
    BnbNf4Weights().convert(model)
    weight = dequantized(model[0])
    assert weight.shape == (64, 128)
    error = (weight.float() - original.float()).norm() / original.float().norm()
    assert 0.02 < error < 0.12  # quantized, and not more than 4 bits explain
    x = torch.randn(rows, 128, dtype=torch.bfloat16)
    added = model[0].bias.double() if bias else 0.0
    expected = x.double() @ weight.double().T + added
    with torch.no_grad():
        found = model(x)
        expected = expected.detach()
    assert found.dtype == torch.bfloat16
    # A result is rounded to bf16 (relative 2^-8) once or twice, after a sum of 128 rounded products.
    scale = (x.double().abs() @ weight.double().abs().T).max()
    assert float((found.double() - expected).abs().max() / scale) < 2**-8


def test_a_whole_nf4_model_is_the_float_model_of_its_dequantized_weights() -> None:
    quantized = BnbNf4Weights().convert(model_of())
    reference = model_of()
    for name, module in quantized.named_modules():
        if type(module).__name__ == "Linear4bit":
            reference.get_submodule(name).weight.data = dequantized(module).bfloat16()
    tokens = torch.tensor(random_prompts([12]))
    with torch.no_grad():
        found, expected = quantized(tokens).logits.float(), reference(tokens).logits.float()
        plain = model_of()(tokens).logits.float()
    difference, effect = (found - expected).norm(), (plain - expected).norm()
    assert difference < 0.1 * effect  # far below what the quantization itself does
    assert difference / expected.norm() < 0.03  # bf16 activations, and scales rounded to 16 bits


@pytest.mark.parametrize("tied", [True, False])
def test_nf4_leaves_a_tied_head_and_the_norms(tied: bool) -> None:
    model = BnbNf4Weights().convert(model_of(tied=tied, vocab_size=64))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["lm_head"] == ("Linear" if tied else "Linear4bit")
    assert kinds["model.layers.0.self_attn.q_proj"] == kinds["model.layers.1.mlp.down_proj"] == "Linear4bit"
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


@pytest.mark.parametrize(
    ("sizes", "layer", "shape"),
    [
        ({"hidden_size": 32, "intermediate_size": 64}, "self_attn.q_proj", "32 x 32"),
        ({"hidden_size": 64, "intermediate_size": 96}, "mlp.down_proj", "64 x 96"),
        ({"hidden_size": 64, "intermediate_size": 80}, "mlp.gate_proj", "80 x 64"),
        ({"tie_word_embeddings": False}, "lm_head", f"{VOCAB_SIZE} x 64"),
    ],
)
def test_awkward_shapes_are_refused_with_what_would_do(
    sizes: dict[str, Any], layer: str, shape: str
) -> None:  # Q6
    with pytest.raises(ValueError, match="multiples of 32 x 64") as caught:
        BnbNf4Weights().convert(model_of(**sizes))
    message = str(caught.value)
    assert layer in message
    assert shape in message
    assert "'plain' holds any shape" in message
    assert "\n" not in message


def test_nf4_refuses_a_model_without_linear_layers() -> None:
    model: Any = nn.Sequential(nn.ReLU())
    model.config = type("Config", (), {"model_type": "nothing"})()
    with pytest.raises(ValueError, match="'nothing' model has no linear layer"):
        BnbNf4Weights().convert(model)


# --- torch's kernels

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def stored(layer: Int8Linear | Int4Linear, original: Tensor) -> Tensor:
    """The weights `[N, K]` the layer stands for, in float64: the primitives' codes, with scales as they are stored."""
    if isinstance(layer, Int8Linear):
        codes = quantize_rows(original).codes
        assert torch.equal(layer.codes, codes)
        scales = layer.scales.double().unsqueeze(-1)
        return Quantized(codes, scales, torch.zeros_like(scales)).dequantized()
    codes = quantize_affine(original, 4, layer.group).codes
    scales, offsets = layer.scales_and_offsets.double().transpose(0, 1).unbind(-1)
    return Quantized(codes, scales, offsets - ZERO_CODE * scales).dequantized()


def check_layer(layer: Int8Linear | Int4Linear, original: nn.Linear, x: Tensor) -> None:
    """Against the float layer that holds the dequantized weights, in float64."""
    weight = stored(layer, original.weight.data)
    added = 0.0 if original.bias is None else original.bias.detach().double()
    with torch.no_grad():
        found = layer(x)
    assert (found.dtype, found.shape) == (x.dtype, (*x.shape[:-1], original.out_features))
    # As with NF4: a result is rounded to the activations' dtype, which for int4 is bf16 at most, once or twice.
    scale = (x.double().abs() @ weight.abs().T).max()
    assert float((found.double() - (x.double() @ weight.T + added)).abs().max() / scale) < 2**-8
    error = (weight - original.weight.double()).norm() / original.weight.double().norm()
    assert (2e-3 < error < 0.02) if isinstance(layer, Int8Linear) else (0.02 < error < 0.12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_an_int8_layer_is_the_float_layer_of_its_dequantized_weights(
    rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((128, 64), (48, 33), (16, 1)):
        original = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        check_layer(Int8Linear(original), original, torch.randn(rows, inputs, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_int4_layer_is_the_float_layer_of_its_dequantized_weights(
    group: int, rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((128, 64), (256, 16), (128, 48)):
        original = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        check_layer(Int4Linear(original, group), original, torch.randn(rows, inputs, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [Int8Linear, lambda linear: Int4Linear(linear, 32)], ids=["int8", "int4"])
def test_activations_may_be_part_of_a_larger_tensor(make: Any, dtype: torch.dtype) -> None:
    """As the last positions of several rows are, which the head gets: the kernels want them side by side."""
    original = nn.Linear(64, 32, bias=False, dtype=dtype)
    whole = torch.randn(3, 5, 64, dtype=dtype)
    wide = torch.randn(64, 3, dtype=dtype)
    for x in (whole[:, -1:], whole[:, 1:3], wide.T):
        check_layer(make(original), original, x)


@pytest.mark.parametrize("make", [Int8Linear, lambda linear: Int4Linear(linear, 32)], ids=["int8", "int4"])
def test_what_is_stored_does_not_keep_the_float_weights_alive(make: Any) -> None:
    """As the history of a gradient would."""
    assert not any(tensor.requires_grad for tensor in make(nn.Linear(64, 32, bias=False)).buffers())


def test_the_last_positions_of_several_rows_reach_a_quantized_head() -> None:
    model = TorchInt4Weights().convert(model_of(tied=False, vocab_size=64))
    runner = ModelRunner(model, 3, 8)
    runner.prefill([[1, 2]] * 3, [0, 1, 2])
    assert runner.decode(torch.tensor([[3, 4]] * 3)).shape == (3, 64)


@pytest.mark.parametrize("weights", [TorchInt8Weights(), TorchInt4Weights()], ids=["int8", "int4"])
def test_a_whole_model_is_the_float_model_of_its_dequantized_weights(weights: WeightsOptions) -> None:
    quantized, reference, plain = weights.convert(model_of()), model_of(), model_of()
    for name, module in quantized.named_modules():
        if isinstance(module, (Int8Linear, Int4Linear)):
            layer: Any = reference.get_submodule(name)
            layer.weight.data = stored(module, layer.weight.data).to(layer.weight.dtype)
    tokens = torch.tensor(random_prompts([12]))
    with torch.no_grad():
        found, expected = quantized(tokens).logits.float(), reference(tokens).logits.float()
        without = plain(tokens).logits.float()
    assert (found - expected).norm() / expected.norm() < 0.03  # bf16 activations, and weights rounded to bf16
    assert (without - expected).norm() / expected.norm() > (
        2e-3 if type(weights) is TorchInt8Weights else 0.05
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", [TorchInt8Weights(), TorchInt4Weights()], ids=["int8", "int4"])
def test_torch_formats_leave_a_tied_head_and_the_norms(weights: WeightsOptions, tied: bool) -> None:
    model = weights.convert(model_of(tied=tied, vocab_size=64))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    own = "Int8Linear" if type(weights) is TorchInt8Weights else "Int4Linear"
    assert kinds["lm_head"] == ("Linear" if tied else own)
    assert kinds["model.layers.0.self_attn.q_proj"] == kinds["model.layers.1.mlp.down_proj"] == own
    assert kinds["model.norm"] == "LlamaRMSNorm"


@pytest.mark.parametrize(
    ("weights", "sizes", "layer", "shape", "multiples"),
    [
        (TorchInt4Weights(), {"hidden_size": 48}, "self_attn.q_proj", "48 x 48", "16 x 32"),
        (TorchInt4Weights(), {"intermediate_size": 80}, "mlp.down_proj", "64 x 80", "16 x 32"),
        (TorchInt4Weights(), {"intermediate_size": 72}, "mlp.gate_proj", "72 x 64", "16 x 32"),
        (TorchInt4Weights(128), {}, "self_attn.q_proj", "64 x 64", "16 x 128"),
        (TorchInt4Weights(), {"tied": False}, "lm_head", f"{VOCAB_SIZE} x 64", "16 x 32"),
    ],
)
def test_shapes_the_int4_kernel_does_not_take_are_refused_by_layer(
    weights: TorchInt4Weights, sizes: dict[str, Any], layer: str, shape: str, multiples: str
) -> None:
    with pytest.raises(ValueError, match="'plain' holds any shape") as caught:
        weights.convert(model_of(**sizes))
    message = str(caught.value)
    assert f"{layer} is {shape}" in message
    assert f"multiples of {multiples}" in message
    assert "\n" not in message


def test_any_number_of_outputs_becomes_int8() -> None:
    model = TorchInt8Weights().convert(model_of(tied=False, hidden_size=48, intermediate_size=80))
    assert type(model.lm_head) is Int8Linear
    assert model.lm_head.out_features == VOCAB_SIZE
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize(
    ("sizes", "layer", "shape"),
    [
        ({"hidden_size": 40}, "self_attn.q_proj", "40 x 40"),
        ({"intermediate_size": 72}, "mlp.down_proj", "64 x 72"),
    ],
)
def test_inputs_with_which_the_int8_kernel_ends_the_process_are_refused(
    sizes: dict[str, Any], layer: str, shape: str
) -> None:
    with pytest.raises(ValueError, match="needs a multiple of 16 inputs; the format 'plain'") as caught:
        TorchInt8Weights().convert(model_of(**sizes))
    assert f"{layer} is {shape}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("group", [0, 16, 33, 256])
def test_groups_the_kernel_does_not_know_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"weights.group={group}: expected one of 32, 64, 128"):
        TorchInt4Weights(group)


@pytest.mark.parametrize("name", ["bnb_nf4", "torch_int8", "torch_int4"])
def test_a_family_whose_layers_are_of_another_kind_is_refused_in_a_line(name: str) -> None:
    """GPT-2 has layers of its own (Conv1D), and its head is the embedding: nothing is left to quantize."""
    model = tiny_model("gpt2", dtype=torch.bfloat16, hidden_size=64, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"^a 'gpt2' model has no linear layer to quantize$"):
        plugins_options(name).convert(model)


@pytest.mark.parametrize("name", ["plain", "bnb_nf4", "torch_int8", "torch_int4"])
def test_each_format_converts_in_place_and_still_computes(name: str) -> None:
    model = model_of()
    converted = plugins_options(name).convert(model)
    assert converted is model
    tokens = torch.tensor(random_prompts([5]))
    with torch.no_grad():
        first, second = converted(tokens).logits, converted(tokens).logits
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not any(module.training for module in converted.modules())


def plugins_options(name: str) -> WeightsOptions:
    plugins.register_all()
    return plugins.default_options("weights", name)


def test_importing_bitsandbytes_never_asks_a_hub_for_code(tmp_path: Path) -> None:
    """A package `kernels` on the path stands for the one that downloads; in a process that has not imported yet."""
    (tmp_path / "kernels.py").write_text(
        "def get_kernel(*_, **__):\n    raise SystemExit('hub code would run')\n"
    )
    program = (
        "import sys; from quant.weights.bnb_nf4 import _bitsandbytes; "
        f"sys.path.insert(0, {str(tmp_path)!r}); print(_bitsandbytes().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "bitsandbytes"), done.stderr
