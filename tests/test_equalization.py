"""quant.equalization on tiny random Llamas: same function, gains of one, balanced pairs, clear refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quant.equalization import balancing_scale, reparametrize

HEAD_SIZE = 8
NUM_KV_HEADS = 2


def _tiny_llama(dtype: torch.dtype = torch.float64, **overrides: Any) -> LlamaForCausalLM:
    """Four query heads on two KV heads, gains far from one, channels of very unequal norms."""
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "tie_word_embeddings": True,
    }
    generator = torch.Generator().manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.rand(parameter.shape[0], generator=generator) * 2 + 0.2
            if parameter.dim() == 1:
                parameter.copy_(spread)
            else:
                noise = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
                parameter.copy_(noise * spread[:, None])
    return model


def _layers(model: LlamaForCausalLM) -> list[LlamaDecoderLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, LlamaDecoderLayer)]


def _logits(model: LlamaForCausalLM) -> torch.Tensor:
    token_ids = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(input_ids=token_ids).logits


# transformers' RMS norm computes in float32 even in a float64 model, hence no tighter bound than 1e-6 there.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_same_function(dtype: torch.dtype, tolerance: float) -> None:
    model = _tiny_llama(dtype)
    before = _logits(model)
    weights_before = copy.deepcopy(model.state_dict())
    reparametrize(model)
    after = _logits(model)
    assert (after - before).abs().max() <= tolerance * before.abs().max()
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    changed = [name for name, weight in model.state_dict().items() if not weight.equal(weights_before[name])]
    assert len(changed) == 9 * len(model.model.layers), "every matrix and gain of a layer, and nothing else"


def test_gains_become_one_and_the_final_norm_stays() -> None:
    model = _tiny_llama()
    final_gain = model.model.norm.weight.clone()
    reparametrize(model)
    for layer in _layers(model):
        assert (layer.input_layernorm.weight == 1).all()
        assert (layer.post_attention_layernorm.weight == 1).all()
    assert torch.equal(model.model.norm.weight, final_gain)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_pairs_are_balanced() -> None:
    model = _tiny_llama()
    reparametrize(model)
    for layer in _layers(model):
        attention, mlp = layer.self_attn, layer.mlp
        for kv_head in range(NUM_KV_HEADS):
            for channel in range(HEAD_SIZE):
                value_row = attention.v_proj.weight[kv_head * HEAD_SIZE + channel]
                # Query heads 2k and 2k + 1 read KV head k.
                columns = [(2 * kv_head + member) * HEAD_SIZE + channel for member in range(2)]
                torch.testing.assert_close(value_row.norm(), attention.o_proj.weight[:, columns].norm())
        torch.testing.assert_close(mlp.up_proj.weight.norm(dim=1), mlp.down_proj.weight.norm(dim=0))


def test_a_second_pass_changes_nothing() -> None:
    model = _tiny_llama()
    reparametrize(model)
    once = copy.deepcopy(model.state_dict())
    reparametrize(model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, once[name])


def test_zero_channels_stay_finite() -> None:
    model = _tiny_llama()
    with torch.no_grad():
        first, second = _layers(model)[:2]
        first.self_attn.v_proj.weight[3] = 0
        first.self_attn.o_proj.weight[:, 5] = 0
        first.mlp.down_proj.weight[:, 11] = 0
        second.mlp.up_proj.weight.zero_()
        second.input_layernorm.weight.zero_()
    before = _logits(model)
    reparametrize(model)
    assert all(weight.isfinite().all() for weight in model.state_dict().values())
    torch.testing.assert_close(_logits(model), before, rtol=0, atol=1e-6 * float(before.abs().max()))


def test_balancing_scale_by_hand() -> None:
    producer, consumer = torch.tensor([8.0, 1.0, 0.0, 3.0]), torch.tensor([2.0, 4.0, 5.0, 0.0])
    assert balancing_scale(producer, consumer).tolist() == [2.0, 0.5, 1.0, 1.0]


def test_other_families_are_refused_by_name() -> None:
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with pytest.raises(ValueError, match="'qwen2'"):
        reparametrize(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("option", ["attention_bias", "mlp_bias"])
def test_biases_are_refused_before_anything_changes(option: str) -> None:
    model = _tiny_llama(torch.float64, **{option: True})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'llama', layer 0, \w+ has one"):
        reparametrize(model)
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_wrapped_layers_are_refused() -> None:
    model = _tiny_llama()

    class Quantized(nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj = Quantized(32, 48, bias=False)
    with pytest.raises(ValueError, match=r"layer 2, up_proj is .*Quantized"):
        reparametrize(model)
