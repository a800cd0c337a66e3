"""Bytes as stored, against formulas worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

from quant.footprint import (
    embedding_row_bytes,
    multiplied_parameters,
    quantized_share,
    read_bytes_per_pass,
    stored_bytes,
)
from quant.weights.base import WeightsOptions
from quant.weights.bnb_nf4 import BnbNf4Weights
from quant.weights.plain import PlainWeights
from quant.weights.torch_int4 import TorchInt4Weights
from quant.weights.torch_int8 import TorchInt8Weights

HIDDEN, INTERMEDIATE, LAYERS, BLOCK = 64, 64, 2, 64
# As in toy_models, with hidden 64: 4 heads and 2 KV heads of 16.
LINEAR_PARAMETERS = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * (HIDDEN // 2) + 3 * HIDDEN * INTERMEDIATE)
NORM_PARAMETERS = (2 * LAYERS + 1) * HIDDEN
TABLE_PARAMETERS = VOCAB_SIZE * HIDDEN


def model_of(
    *, tied: bool, dtype: torch.dtype = torch.bfloat16, vocab_size: int = VOCAB_SIZE
) -> PreTrainedModel:
    return tiny_model(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        tie_word_embeddings=tied,
        dtype=dtype,
        vocab_size=vocab_size,
    )


def buffer_bytes(model: nn.Module) -> int:
    return sum(
        {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in model.buffers()}.values()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_bytes_are_parameters_times_width(dtype: torch.dtype) -> None:
    model = model_of(tied=False, dtype=dtype)
    parameters = LINEAR_PARAMETERS + NORM_PARAMETERS + 2 * TABLE_PARAMETERS
    assert stored_bytes(model) == parameters * dtype.itemsize + buffer_bytes(model)


def test_a_tied_head_counts_once() -> None:
    tied, untied = model_of(tied=True), model_of(tied=False)
    assert stored_bytes(untied) - stored_bytes(tied) == 2 * TABLE_PARAMETERS


def test_a_view_counts_its_storage_once() -> None:
    module = nn.Module()
    whole = torch.zeros(10, 4)
    module.register_buffer("whole", whole)
    module.register_buffer("part", whole[2:5])
    module.register_buffer("other", torch.zeros(3))
    assert stored_bytes(module) == 160 + 12


def test_a_pass_reads_one_row_of_an_embedding_that_is_not_the_head() -> None:
    untied, tied = model_of(tied=False), model_of(tied=True)
    assert stored_bytes(untied) - read_bytes_per_pass(untied) == 2 * (VOCAB_SIZE - 1) * HIDDEN
    assert read_bytes_per_pass(tied) == stored_bytes(tied)
    # The same pass: the head once, and one row of the table where it is a second one.
    assert read_bytes_per_pass(untied) - read_bytes_per_pass(tied) == 2 * HIDDEN


def test_nothing_is_quantized_in_a_plain_model() -> None:
    assert quantized_share(model_of(tied=True)) == 0
    assert quantized_share(nn.Module()) == 0


# --- NF4: half a byte a weight, and an absmax per block


def nf4_bytes(outputs: int, inputs: int) -> int:
    """Codes, a float32 absmax per block of 64, and the table of the 16 code values."""
    return outputs * inputs // 2 + 4 * (outputs * inputs // BLOCK) + 4 * 16


def test_one_nf4_layer_is_codes_scales_and_tables() -> None:
    model = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    BnbNf4Weights().convert(model)  # type: ignore[arg-type]
    assert stored_bytes(model) == nf4_bytes(64, 128)


def test_an_nf4_bias_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(128, 64, bias=True, dtype=torch.bfloat16))
    BnbNf4Weights().convert(model)  # type: ignore[arg-type]
    assert stored_bytes(model) == nf4_bytes(64, 128) + 64 * 2
    assert quantized_share(model) == 128 * 64 / (128 * 64 + 64)


def test_a_whole_nf4_model() -> None:
    plain = model_of(tied=True)
    buffers = buffer_bytes(plain)
    quantized = BnbNf4Weights().convert(model_of(tied=True))
    # q, o, gate, up, down; k, v
    linears = LAYERS * (5 * nf4_bytes(HIDDEN, HIDDEN) + 2 * nf4_bytes(HIDDEN // 2, HIDDEN))
    assert stored_bytes(quantized) == linears + 2 * (NORM_PARAMETERS + TABLE_PARAMETERS) + buffers
    total = LINEAR_PARAMETERS + NORM_PARAMETERS + TABLE_PARAMETERS
    assert quantized_share(quantized) == LINEAR_PARAMETERS / total


def test_scales_are_counted_and_the_linear_part_is_below_0_4() -> None:  # Q3
    """4 bits and half of one for the scales, of 16."""
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    before = stored_bytes(layers)
    BnbNf4Weights().convert(layers)  # type: ignore[arg-type]
    assert 4.5 / 16 < stored_bytes(layers) / before < 0.4


def test_a_forward_does_not_lose_bytes() -> None:
    """bitsandbytes repacks the weight and moves its scales at the first product on CPU."""
    layers = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    BnbNf4Weights().convert(layers)  # type: ignore[arg-type]
    with torch.no_grad():
        layers(torch.zeros(1, 128, dtype=torch.bfloat16))
    # Codes, two or four bytes for each block's absmax, and the table.
    assert 128 * 64 // 2 + 2 * (128 * 64 // BLOCK) <= stored_bytes(layers) <= nf4_bytes(64, 128)
    assert quantized_share(layers) == 1


# --- torch's formats: no tables, scales in the weights' dtype


def int8_bytes(outputs: int, inputs: int) -> int:
    """A byte a weight, and a scale of two bytes per output."""
    return outputs * inputs + 2 * outputs


def int4_bytes(outputs: int, inputs: int, group: int = 32) -> int:
    """Half a byte a weight, and a scale and an offset of two bytes each per group."""
    return outputs * inputs // 2 + 4 * outputs * (inputs // group)


TORCH_FORMATS = [
    pytest.param(TorchInt8Weights(), int8_bytes, id="int8"),
    pytest.param(TorchInt4Weights(), int4_bytes, id="int4"),
]


@pytest.mark.parametrize(("weights", "layer_bytes"), TORCH_FORMATS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_whole_model_in_torchs_formats(
    weights: WeightsOptions, layer_bytes: Callable[[int, int], int], tied: bool
) -> None:
    vocab_size = 64
    buffers = buffer_bytes(model_of(tied=tied, vocab_size=vocab_size))
    quantized = weights.convert(model_of(tied=tied, vocab_size=vocab_size))
    linears = LAYERS * (5 * layer_bytes(HIDDEN, HIDDEN) + 2 * layer_bytes(HIDDEN // 2, HIDDEN))
    head = 0 if tied else layer_bytes(vocab_size, HIDDEN)
    table = vocab_size * HIDDEN
    expected = linears + head + 2 * (NORM_PARAMETERS + table) + buffers
    for _ in range(2):  # a forward changes nothing
        assert stored_bytes(quantized) == expected
        with torch.no_grad():
            quantized(torch.zeros(1, 1, dtype=torch.long))
    assert read_bytes_per_pass(quantized) == expected - (0 if tied else 2 * (vocab_size - 1) * HIDDEN)
    in_format = LINEAR_PARAMETERS + (0 if tied else table)
    total = LINEAR_PARAMETERS + NORM_PARAMETERS + (1 if tied else 2) * table
    assert quantized_share(quantized) == in_format / total


def test_a_bias_in_torchs_formats_stays_as_it_is() -> None:
    for weights, layer_bytes in ((TorchInt8Weights(), int8_bytes), (TorchInt4Weights(128), None)):
        model: Any = nn.Sequential(nn.Linear(128, 64, bias=True, dtype=torch.bfloat16))
        model.device = torch.device("cpu")
        weights.convert(model)
        stored = int4_bytes(64, 128, 128) if layer_bytes is None else layer_bytes(64, 128)
        assert stored_bytes(model) == stored + 64 * 2
        assert quantized_share(model) == 128 * 64 / (128 * 64 + 64)


# --- what further tokens read, and what every token is multiplied with


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_further_token_reads_a_row_of_a_table_that_is_not_the_head(dtype: torch.dtype) -> None:
    assert embedding_row_bytes(model_of(tied=False, dtype=dtype)) == HIDDEN * dtype.itemsize
    assert embedding_row_bytes(model_of(tied=True, dtype=dtype)) == 0


def test_a_pass_over_all_tokens_of_the_vocabulary_reads_the_whole_table() -> None:
    model = model_of(tied=False)
    assert read_bytes_per_pass(model) + (VOCAB_SIZE - 1) * embedding_row_bytes(model) == stored_bytes(model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "weights",
    [PlainWeights(), BnbNf4Weights(), TorchInt8Weights(), TorchInt4Weights()],
    ids=["plain", "nf4", "int8", "int4"],
)
def test_multiplied_parameters_are_numbers_however_stored(weights: WeightsOptions, tied: bool) -> None:
    vocab_size = 64  # the format holds an untied head of multiples of 32 only
    model = weights.convert(model_of(tied=tied, vocab_size=vocab_size))
    expected = (LINEAR_PARAMETERS, vocab_size * HIDDEN)
    assert multiplied_parameters(model) == expected
    assert embedding_row_bytes(model) == (0 if tied else HIDDEN * 2)
    with torch.no_grad():  # the first forward repacks 4-bit weights
        model(torch.zeros(1, 1, dtype=torch.long))
    assert multiplied_parameters(model) == expected


def test_biases_and_norms_are_not_multiplied() -> None:
    plain, biased = (
        tiny_model("qwen2"),
        tiny_model("llama", attention_bias=True, mlp_bias=True),
    )
    assert (
        multiplied_parameters(plain) == multiplied_parameters(biased) == multiplied_parameters(tiny_model())
    )


def test_the_layers_that_gpt2_calls_conv1d_are_multiplied_too() -> None:
    model = tiny_model("gpt2", hidden_size=HIDDEN)
    body = (
        LAYERS * (3 + 1 + 4 + 4) * HIDDEN * HIDDEN
    )  # query, key and value; output; up and down, 4 times as wide
    assert multiplied_parameters(model) == (body, VOCAB_SIZE * HIDDEN)
