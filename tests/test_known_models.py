"""Sizes and peaks that others publish: parameters against their counts, costs against models built of such sizes."""

from __future__ import annotations

import pytest
import torch
from toy_models import VOCAB_SIZE, tiny_model

from experiments.known_devices import KNOWN_DEVICES, KnownDevice
from experiments.known_models import KNOWN_MODELS, KnownModel
from quant.footprint import embedding_row_bytes, multiplied_parameters, read_bytes_per_pass

# Numbers of parameters in the published files, and bytes of cache of a token in 16 bits.
PUBLISHED = {
    "SmolLM2 135M": (134_515_008, 23_040),
    "Qwen2.5 0.5B": (494_032_768, 12_288),
    "Llama 3.2 1B": (1_235_814_400, 32_768),
    "Llama 2 7B": (6_738_415_616, 524_288),
    "Mistral 7B v0.3": (7_248_023_552, 131_072),
    "Qwen2.5 7B Instruct": (7_615_616_512, 57_344),
    "Llama 3.1 8B": (8_030_261_248, 131_072),
}


def test_every_known_model_has_the_parameters_of_its_file() -> None:
    assert {
        name: (model.num_parameters, model.kv_bytes_per_token()) for name, model in KNOWN_MODELS.items()
    } == PUBLISHED


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_costs_are_those_of_a_real_model_of_such_sizes(family: str, is_tied: bool) -> None:
    real = tiny_model(family, dtype=torch.float32, tie_word_embeddings=is_tied)
    known = KnownModel(
        "tiny", 2, 32, 48, 4, 2, 8, VOCAB_SIZE, 128, is_tied=is_tied, has_qkv_bias=family == "qwen2"
    )
    cost = known.cost(bytes_per_weight=4, bytes_per_value=4)
    assert known.num_parameters == sum(weight.numel() for weight in real.parameters())
    assert (cost.body_parameters, cost.head_parameters) == multiplied_parameters(real)
    rotary = sum(buffer.nbytes for buffer in real.buffers())  # a few numbers, which published sizes leave out
    assert cost.weights_read_bytes == read_bytes_per_pass(real) - rotary
    assert cost.embedding_row_bytes == embedding_row_bytes(real)
    assert cost.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # key and value, layers, heads, numbers, bytes
    assert cost.attention_width == 2 * 4 * 8  # layers, heads, numbers


def test_fewer_bits_are_fewer_bytes() -> None:
    model = KNOWN_MODELS["Llama 3.1 8B"]
    assert model.weights_bytes(0.5) == model.weights_bytes() / 4
    assert model.cost(1.0).weights_read_bytes == model.cost(2.0).weights_read_bytes / 2
    assert model.cost(2.0, 0.5).kv_bytes_per_token == model.kv_bytes_per_token() / 4


def test_devices_say_where_their_figures_are_from() -> None:
    for name, device in KNOWN_DEVICES.items():
        assert name == device.name
        assert device.source
        if device.gemm_tflop_s is not None:
            ceilings = device.ceilings
            assert ceilings.read_gb_s == device.read_gb_s
            assert ceilings.gemm_gflop_s == 1000 * device.gemm_tflop_s


def test_a_rate_that_is_not_published_is_not_guessed() -> None:
    with pytest.raises(
        ValueError, match=r"^device=x: its arithmetic rate is not published; expected measured ceilings$"
    ):
        _ = KnownDevice("x", 100, None, 16, "its maker").ceilings
