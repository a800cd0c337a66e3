"""Bytes as stored, against formulas worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy_models import VOCAB_SIZE, tiny_model
from toy_weights import FORMATS, linear_of
from transformers import PreTrainedModel

from quant.footprint import (
    bits_per_weight,
    embedding_row_bytes,
    layer_read_bytes,
    linear_layers,
    multiplied_parameters,
    num_parameters,
    quantized_share,
    read_bytes_per_pass,
    stored_bytes,
)

HIDDEN, INTERMEDIATE, LAYERS = 64, 64, 2
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


# --- quantized layers: the formulas, by format


def layer_bytes(label: str, outputs: int, inputs: int, *, tied: bool = False) -> int:
    """Of shapes that are multiples of 64 x 128: nothing is padded. `tied`: an embedding looks up the rows."""
    numbers, outputs_ = outputs * inputs, outputs
    half_bytes = numbers // 2
    places = 4 * inputs * (32 if label == "bnb_nf4" else 64) if tied else 0
    return {
        "int8": numbers + 2 * outputs_,  # a scale in bf16
        # Packed by oneDNN with a sum per output; scale and zero point in 32 bits; and the codes again.
        "int8_onednn": numbers + 3 * 4 * outputs_ + (numbers if tied else 0),
        "int4": half_bytes + 4 * numbers // 32 + places,  # a scale and an offset in bf16
        "int4_64": half_bytes + 4 * numbers // 64 + places,
        "int4_symmetric": half_bytes + 4 * numbers // 128 + places,
        "bnb_nf4": half_bytes + 2 * numbers // 64 + 4 * 16 + places,  # and the 16 values
        "bnb_int8": numbers + 4 * outputs_,
        "quanto_int8": numbers + 2 * outputs_,
        "quanto_int4": half_bytes + 4 * numbers // 128 + places,
    }[label]


@pytest.mark.parametrize("label", FORMATS)
def test_a_layer_is_codes_and_scales_before_and_after_a_product(label: str) -> None:  # Q3
    model: Any = nn.Sequential(linear_of(64, 256, bias=True))
    FORMATS[label].weights.convert(model)
    for _ in range(2):
        assert stored_bytes(model) == layer_bytes(label, 64, 256) + 2 * 64  # the bias stays as it is
        assert quantized_share(model) == 256 * 64 / (256 * 64 + 64)
        assert num_parameters(model) == 256 * 64 + 64
        assert bits_per_weight(model) == 8 * stored_bytes(model) / (256 * 64 + 64)
        with torch.no_grad():
            model(torch.ones(1, 3, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_whole_model(label: str, tied: bool) -> None:
    sizes: Any = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 64, "tie_word_embeddings": tied}
    model = tiny_model(dtype=torch.bfloat16, **sizes)
    buffers, before = buffer_bytes(model), stored_bytes(model)
    FORMATS[label].weights.convert(model)
    linears = LAYERS * (5 * layer_bytes(label, 128, 128) + 2 * layer_bytes(label, 64, 128))
    head = layer_bytes(label, 64, 128, tied=tied)
    norms, table = (2 * LAYERS + 1) * 128, 64 * 128
    expected = linears + head + 2 * (norms + (0 if tied else table)) + buffers
    for _ in range(2):  # a forward changes nothing
        assert stored_bytes(model) == expected
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long))
    # What only a look-up reads is read a row per token.
    of_lookups = head - layer_bytes(label, 64, 128) if tied else 2 * table
    row = of_lookups // (32 if label == "bnb_nf4" and tied else 64)
    assert read_bytes_per_pass(model) == expected - of_lookups + row
    assert embedding_row_bytes(model) == row
    quantized = LAYERS * (5 * 128 * 128 + 2 * 64 * 128) + table
    assert quantized_share(model) == quantized / (quantized + norms + (0 if tied else table))
    assert multiplied_parameters(model) == (quantized - table, table)
    assert expected < before


def test_weights_of_the_libraries_own_modules_are_known_too() -> None:
    """Made by others, not by the formats here: as a model loaded already quantized has them."""
    import bitsandbytes

    from quant.kernels import quanto as own

    library = own.library()

    nf4 = bitsandbytes.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compress_statistics=False)
    nf4 = nf4.to("cpu")
    assert stored_bytes(nf4) == 128 * 64 // 2 + 4 * 128 * 64 // 64 + 4 * 16
    assert (quantized_share(nf4), num_parameters(nf4)) == (1, 128 * 64)
    eight = bitsandbytes.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False).to("cpu")
    assert stored_bytes(eight) == 128 * 64 + 4 * 64
    assert (quantized_share(eight), num_parameters(eight)) == (1, 128 * 64)
    quanto = nn.Sequential(linear_of(64, 128))
    library.quantize(quanto, weights=library.qint8)
    library.freeze(quanto)
    assert stored_bytes(quanto) == 128 * 64 + 2 * 64 + 2 * 2  # two scales of activations that nothing uses
    assert (quantized_share(quanto), num_parameters(quanto)) == (1, 128 * 64)


# --- what further tokens read, and what every token is multiplied with


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_further_token_reads_a_row_of_a_table_that_is_not_the_head(dtype: torch.dtype) -> None:
    assert embedding_row_bytes(model_of(tied=False, dtype=dtype)) == HIDDEN * dtype.itemsize
    assert embedding_row_bytes(model_of(tied=True, dtype=dtype)) == 0


def test_a_pass_over_all_tokens_of_the_vocabulary_reads_the_whole_table() -> None:
    model = model_of(tied=False)
    assert read_bytes_per_pass(model) + (VOCAB_SIZE - 1) * embedding_row_bytes(model) == stored_bytes(model)


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


@pytest.mark.parametrize("label", FORMATS)
def test_linear_layers_of_a_converted_model_are_as_many_as_before(label: str) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=128, vocab_size=64, dtype=torch.bfloat16)
    before = len(linear_layers(model))
    assert before == 7 * LAYERS + 1
    assert len(linear_layers(FORMATS[label].weights.convert(model))) == before


def test_a_head_that_looks_rows_up_reads_less_than_it_stores() -> None:
    head = tiny_model(hidden_size=64, vocab_size=64, tie_word_embeddings=True, dtype=torch.bfloat16)
    before = layer_read_bytes(head.get_output_embeddings())
    assert before == 2 * 64 * 64
    layer: Any = FORMATS["int4"].weights.convert(head).get_output_embeddings()
    assert layer_read_bytes(layer) == stored_bytes(layer) - layer.num_lookup_bytes < stored_bytes(layer)
