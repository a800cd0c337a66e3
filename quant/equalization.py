"""Re-parametrize a Llama model without changing its function: fold norm gains, equalize linear pairs.

Why: a checkpoint restored from a quantized file still lies on that file's grid, so a quantizer with the same
grid would look lossless on it. The equivalent weights made here lie on no grid and quantize like any others.
Knows nothing about files, tokenizers or quantizers.

Source: cross-layer equalization, Nagel et al. 2019 (arXiv 1906.04721, section 4.1), with L2 norms of channels
in place of their ranges.

Axes: H hidden, M MLP channels, N KV heads, G query heads per KV head, D head size.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP


@torch.no_grad()
def reparametrize(model: PreTrainedModel) -> None:
    """Rewrite the weights of every decoder layer in place; the model computes what it computed before.

    Afterwards the input and post-attention norms have gain 1, and each value channel has the norm of the
    o_proj columns that read it, each up channel that of its down_proj column. The final norm keeps its gain,
    since a tied head has no weights of its own to fold it into. Computed in float64 and rounded once to each
    parameter's dtype: logits agree to rounding of that dtype, not bit for bit.

    Raises ValueError, before any weight is touched, for a model other than a plain Llama without biases.
    """
    for layer in _supported_layers(model):
        attention_gain = _take_gain(layer.input_layernorm.weight)
        _rewrite_attention(layer.self_attn, attention_gain)
        mlp_gain = _take_gain(layer.post_attention_layernorm.weight)
        _rewrite_mlp(layer.mlp, mlp_gain)


def balancing_scale(producer_norms: Tensor, consumer_norms: Tensor) -> Tensor:
    """Scale per channel that makes both norms equal: divide the producer by it, multiply the consumer.

    It is sqrt(producer / consumer) (Nagel et al. 2019, equation 11), of the shape of its arguments. A channel
    that is zero on either side contributes nothing whatever its scale: it keeps scale 1.
    """
    alive = (producer_norms > 0) & (consumer_norms > 0)
    ratio = torch.where(alive, producer_norms, 1.0) / torch.where(alive, consumer_norms, 1.0)
    return ratio.sqrt()


def _take_gain(weight: Tensor) -> Tensor:
    """The norm's gain [H] in float64; the norm itself is left with gain 1."""
    gain = weight.to(torch.float64, copy=True)  # a copy even of a float64 weight, which is overwritten next
    weight.fill_(1.0)
    return gain


def _rewrite_attention(attention: LlamaAttention, gain: Tensor) -> None:
    """Fold the gain into q, k, v; balance each value channel against its group's o_proj columns."""
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.copy_(projection.weight.double() * gain)
    value = attention.v_proj.weight.double() * gain
    output = attention.o_proj.weight.double()
    # Query heads are laid out group by group, so the columns that read one KV head are contiguous.
    grouped_output = output.view(output.shape[0], -1, attention.num_key_value_groups, attention.head_dim)
    value_norms = value.norm(dim=1).view(-1, attention.head_dim)  # [N, D]
    output_norms = torch.linalg.vector_norm(grouped_output, dim=(0, 2))  # [H, N, G, D] -> [N, D]
    scale = balancing_scale(value_norms, output_norms)
    attention.v_proj.weight.copy_(value / scale.view(-1, 1))
    attention.o_proj.weight.copy_((grouped_output * scale[:, None, :]).view_as(output))


def _rewrite_mlp(mlp: LlamaMLP, gain: Tensor) -> None:
    """Fold the gain into gate and up; balance up against down (the gated product is linear in up)."""
    mlp.gate_proj.weight.copy_(mlp.gate_proj.weight.double() * gain)
    up = mlp.up_proj.weight.double() * gain  # [M, H]
    down = mlp.down_proj.weight.double()  # [H, M]
    scale = balancing_scale(up.norm(dim=1), down.norm(dim=0))
    mlp.up_proj.weight.copy_(up / scale[:, None])
    mlp.down_proj.weight.copy_(down * scale)


def _supported_layers(model: PreTrainedModel) -> list[LlamaDecoderLayer]:
    model_type = model.config.model_type
    if not isinstance(model, LlamaForCausalLM) or model_type != "llama":
        raise ValueError(f"equalization fits Llama models only, not model type {model_type!r}")
    layers = [layer for layer in model.model.layers if isinstance(layer, LlamaDecoderLayer)]
    for index, layer in enumerate(layers):
        for name, projection in _projections(layer).items():
            place = f"model type {model_type!r}, layer {index}, {name}"
            # A quantized or adapted layer is a subclass or a wrapper: its weight is not the whole truth.
            if type(projection) is not nn.Linear:
                raise ValueError(f"equalization fits plain linear layers only: {place} is {type(projection)}")
            if projection.bias is not None:
                raise ValueError(f"equalization fits layers without bias only: {place} has one")
    return layers


def _projections(layer: LlamaDecoderLayer) -> dict[str, nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "q_proj": attention.q_proj,
        "k_proj": attention.k_proj,
        "v_proj": attention.v_proj,
        "o_proj": attention.o_proj,
        "gate_proj": mlp.gate_proj,
        "up_proj": mlp.up_proj,
        "down_proj": mlp.down_proj,
    }
