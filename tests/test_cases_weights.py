"""Faults that others shipped with quantized weights (Q3 to Q7, Q9, Q12), each made impossible or refused in words."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_engine import build_decoder, collect, model_drafter, requests_for
from toy_models import random_prompts, tiny_model
from toy_weights import FORMATS, bf16_model, converted_layer, linear_of, oracle

import specdec
from quant.footprint import stored_bytes
from quant.kernels.base import QuantizedLinear
from quant.plan import warn_once
from quant.primitives import quantize_centred
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CHECKOUT = Path(__file__).resolve().parents[1]
CAN_BE_COPIED = {"int8", "int4", "int4_64", "int4_symmetric", "bnb_nf4", "bnb_int8"}


def activations(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# --- Q3: bytes of wrapped tensors wrong


@pytest.mark.parametrize("label", FORMATS)
def test_q3_bytes_are_walked_scales_included(label: str) -> None:
    layers: Any = nn.Sequential(*[linear_of(512, 512) for _ in range(2)])
    before = stored_bytes(layers)
    FORMATS[label].weights.convert(layers)
    bits = FORMATS[label].bits
    ratio = stored_bytes(layers) / before
    assert bits / 16 < ratio < (0.6 if bits == 8 else 0.4)


# --- Q4: packed weights corrupted by a move, a copy or a conversion after a forward


@pytest.mark.parametrize("label", FORMATS)
def test_q4_a_copy_computes_the_same_or_is_refused(label: str) -> None:
    layer, x = converted_layer(label, linear_of(48, 72, bias=True)), activations(1, 3, 72)
    with torch.no_grad():
        before = layer(x)
        if label in CAN_BE_COPIED:
            other = copy.deepcopy(layer)
            assert torch.equal(other(x), before)
            assert stored_bytes(other) == stored_bytes(layer)
        else:
            with pytest.raises(ValueError, match="can't be copied: convert another float model"):
                copy.deepcopy(layer)
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("move", [{"device": "meta"}, {"dtype": torch.float32}, {"dtype": torch.float16}])
def test_q4_a_move_after_a_forward_is_refused_and_harms_nothing(label: str, move: dict[str, Any]) -> None:
    model = FORMATS[label].weights.convert(bf16_model())
    tokens = torch.tensor(random_prompts([5]))
    with torch.no_grad():
        before = model(tokens).logits
        for place in model.modules():
            if isinstance(place, QuantizedLinear):
                with pytest.raises(ValueError, match=r"weights packed for .* can't move to .* before"):
                    place.to(**move)
        nn.Module.to(model, "cpu", torch.bfloat16)  # where it is: nothing to move
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("label", FORMATS)
def test_q4_looking_rows_up_after_a_forward_gives_what_it_gave_before(label: str) -> None:
    model = FORMATS[label].weights.convert(bf16_model())
    ids = torch.arange(61)
    before = model.get_input_embeddings()(ids)
    with torch.no_grad():
        model(ids.unsqueeze(0))
    assert torch.equal(model.get_input_embeddings()(ids), before)


# --- Q5: a row depends on its batch mates


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("shape", [(48, 64), (192, 576), (33, 72)])
def test_q5_a_row_alone_and_in_company(label: str, shape: tuple[int, int]) -> None:
    """Every declaration is tried: bit for bit, 1 row to those of 4 texts with 6 drafts, one of them with outliers."""
    layer = converted_layer(label, linear_of(*shape, bias=True))
    assert isinstance(layer, QuantizedLinear)
    rows = activations(1, 28, shape[1])
    rows[0, 7, 3] = 100.0
    with torch.no_grad():
        alone = torch.cat([layer(rows[:, i : i + 1]) for i in range(28)], 1)
        counts = (*range(1, 9), 15, 16, 17, 28)
        same = [torch.equal(layer(rows[:, :count]), alone[:, :count]) for count in counts]
        same += [torch.equal(layer(rows.view(4, 7, -1)), alone.view(4, 7, -1))]
        same += [torch.equal(layer(rows.view(28, 1, -1)), alone.view(28, 1, -1))]
    assert layer.row_invariant is all(same)


def test_q5_llm_int8_without_a_threshold_has_no_outliers_to_share() -> None:
    """What makes a row depend on others is the threshold; the format doesn't declare more than the default keeps."""
    from quant.weights.bnb_int8 import BnbInt8Weights

    layer = converted_layer("bnb_int8", linear_of(48, 64), weights=BnbInt8Weights(threshold=0.0))
    rows = activations(1, 8, 64)
    rows[0, 7, 3] = 100.0
    with torch.no_grad():
        alone = torch.cat([layer(rows[:, i : i + 1]) for i in range(8)], 1)
        assert torch.equal(layer(rows), alone)


ROW_INVARIANT = [label for label in FORMATS if label != "bnb_int8"]


@pytest.mark.parametrize("label", [label for label in ROW_INVARIANT if label != "quanto_int4"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_speculation_on_quantized_weights_is_its_twin_token_for_token(label: str, tied: bool) -> None:
    """In float32, so that what is not quantized (attention) rounds too little to show."""
    sizes: Any = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": tied}
    model = FORMATS[label].weights.convert(tiny_model(dtype=torch.float32, **sizes))
    prompts = random_prompts([3, 9, 17])
    twin = specdec.generate(model, prompts, max_new_tokens=24)
    for drafter in (tiny_model(dtype=torch.float32, seed=1), model, specdec.PromptLookupOptions()):
        assert specdec.generate(model, prompts, drafter=drafter, max_new_tokens=24) == twin


@pytest.mark.parametrize("label", ROW_INVARIANT)
def test_so_it_is_in_bf16_where_all_passes_have_one_shape(label: str) -> None:
    """The kernels of a real run; attention in bf16 rounds by the shape of a pass, so that is kept."""
    model = FORMATS[label].weights.convert(bf16_model())
    assert FORMATS[label].weights.plan(bf16_model(), CPU, torch.bfloat16).row_invariant
    requests = requests_for(random_prompts([3, 9, 17]), [20, 20, 20])
    texts = []
    for drafter in (None, model_drafter(bf16_model(seed=1), 3, 48), PromptLookupDrafter(1, 2, CPU)):
        runner = ModelRunner(model, 3, 48, pass_tokens=8)
        decoder = build_decoder(runner, num_slots=3, drafter=drafter, draft_length=4)
        texts.append(collect(decoder.generate(requests)))
    assert texts[1] == texts[2] == texts[0]


# --- Q6: shapes that don't divide


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("shape", [(576, 288), (288, 576), (61, 96), (30, 100), (7, 33), (1, 1)])
def test_q6_awkward_shapes_are_padded_and_said_to_be(label: str, shape: tuple[int, int]) -> None:
    linear = linear_of(*shape)
    (row,) = FORMATS[label].weights.plan(nn.Sequential(linear), CPU, torch.bfloat16).rows
    layer, x = converted_layer(label, linear), activations(2, 3, shape[1])
    assert isinstance(layer, QuantizedLinear)
    assert row.storage is not None
    assert stored_bytes(layer) == row.storage.stored_bytes
    if row.reason:
        assert row.reason.startswith("padded to ")
    with torch.no_grad():
        found = layer(x).double()
    weight = oracle(label, linear)
    scale = (x.double().abs() @ weight.abs().T).max()
    assert float((found - x.double() @ weight.T).abs().max() / scale) < 2**-6


# --- Q7: can't be copied (Q4), or run in inference_mode


@pytest.mark.parametrize("label", FORMATS)
def test_q7_inference_mode_computes_the_same(label: str) -> None:
    model = FORMATS[label].weights.convert(bf16_model())
    tokens = torch.tensor(random_prompts([5]))
    with torch.inference_mode():
        found = model(tokens).logits.clone()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, found)


@pytest.mark.slow
def test_q7_quantos_4_bits_in_float32_run_or_are_refused_in_words() -> None:
    """The library's own way, by an extension that it compiles at first use: a minute, once per installation."""
    from quant.weights.quanto_int4 import QuantoInt4Weights

    linear = linear_of(64, 128, dtype=torch.float32)
    layer = converted_layer("quanto_int4", linear, weights=QuantoInt4Weights())
    x = torch.randn(1, 3, 128)
    with torch.no_grad():
        found = layer(x)
    assert (found - x @ linear.weight.T).norm() < 0.2 * found.norm()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"use torch.no_grad\(\)"):
        layer(x)


# --- Q9: a slow fallback without a word


@pytest.mark.parametrize("label", ["quanto_int8"])
def test_q9_a_slow_way_is_named_and_warned_of(label: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    (row,) = FORMATS[label].weights.plan(linear_of(64, 64), CPU, torch.float32).rows
    assert row.storage is not None
    assert "dequantized at each product" in row.storage.kernel
    assert row.reason.startswith("slow: ")
    assert "which is slow" in caplog.text
    layer = converted_layer(label, linear_of(64, 64, dtype=torch.float32))
    assert isinstance(layer, QuantizedLinear)
    assert (layer.kernel, layer.row_invariant) == (row.storage.kernel, row.storage.row_invariant)


def test_q9_without_bf16_instructions_nf4_says_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quant.kernels.nf4.is_native", lambda: False)
    warn_once.cache_clear()
    linear = linear_of(64, 128)
    (row,) = FORMATS["bnb_nf4"].weights.plan(nn.Sequential(linear), CPU, torch.bfloat16).rows
    assert row.storage is not None
    assert "unpacked at each product" in row.storage.kernel
    assert "is slow" in caplog.text
    layer = converted_layer("bnb_nf4", linear)
    assert isinstance(layer, QuantizedLinear)
    assert layer.kernel == row.storage.kernel
    assert stored_bytes(layer) == row.storage.stored_bytes
    ids = torch.tensor([0, 63, 5])
    assert torch.equal(layer.rows(ids).double(), oracle("bnb_nf4", linear)[ids])


# --- Q12: one bit width hard-coded


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_q12_every_width_uses_all_its_codes(bits: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = quantize_centred(weight, bits, 64)
    assert set(found.codes.unique().tolist()) == set(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))


def test_quanto_is_imported_whatever_else_the_process_imported() -> None:
    """Looking for pip takes setuptools' own distutils away, without which its import fails unless it is told."""
    program = (
        "import importlib.util as u; u.find_spec('pip'); from quant.kernels import quanto; quanto.library()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
