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
from quant.weights.base import replace_linears
from quant.weights.bnb_nf4 import BnbNf4Weights
from quant.weights.plain import PlainWeights

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
    assert not BnbNf4Weights.lossless


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


@pytest.mark.parametrize("name", ["plain", "bnb_nf4"])
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


def plugins_options(name: str) -> BnbNf4Weights | PlainWeights:
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
