"""Bytes as stored: a walk over tensors, since libraries leave scales out or report unquantized sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quant.kernels.base import QuantizedLinear

_LINEAR_KINDS = (nn.Linear, Conv1D, QuantizedLinear)  # Conv1D is GPT-2's


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers with their scales; each storage counts once (a tied head is one)."""
    storages = {}
    for tensor in _tensors(model):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
        else:  # packed by oneDNN, which alone knows the size
            storages[(tensor.device, id(tensor))] = torch.ops.mkldnn._nbytes(tensor)
    return sum(storages.values())


def num_parameters(model: nn.Module) -> int:
    """How many numbers the parameters are, however they are stored; a tied head's count once."""
    return sum(count for count, _ in _counts(model))


def bits_per_weight(model: nn.Module) -> float:
    """Everything stored, scales, padding and buffers included, by the number of parameters; 0 without any."""
    count = num_parameters(model)
    return 8 * stored_bytes(model) / count if count else 0.0


def read_bytes_per_pass(model: nn.Module) -> int:
    """Bytes of weights that a pass over one token reads.

    Everything stored, but of an embedding table that is not also the head only one row; nor more than a row of what a
    quantized head stores for looking rows up.
    """
    total = stored_bytes(model)
    for table in _own_tables(model):
        total -= table.weight.nbytes - table.weight[0].nbytes
    for layer in _quantized_layers(model):
        total -= layer.num_lookup_bytes - layer.num_row_bytes
    return total


def embedding_row_bytes(model: nn.Module) -> int:
    """Bytes that each further token of a pass reads of embedding tables; 0 where the table is also the head."""
    tables = sum(table.weight[0].nbytes for table in _own_tables(model))
    return tables + sum(layer.num_row_bytes for layer in _quantized_layers(model))


def multiplied_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Weights that every token is multiplied with: in the layers, and in the head (run where logits are wanted).

    Counted as numbers, however they are stored.
    """
    head = model.get_output_embeddings()
    body = sum(_weights(module) for module in _outer_modules(model) if module is not head)
    return body, _weights(head)


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """All linear layers, of whatever kind; none of the libraries' own inside a quantized one."""
    return [module for module in _outer_modules(model) if isinstance(module, _LINEAR_KINDS)]


def layer_read_bytes(layer: nn.Module) -> int:
    """Bytes that a product with a linear layer reads of it, however few rows it multiplies."""
    return stored_bytes(layer) - (layer.num_lookup_bytes if isinstance(layer, QuantizedLinear) else 0)


def quantized_share(model: nn.Module) -> float:
    """Share of the parameters, counted as numbers, that are really quantized, by whichever library."""
    counts = list(_counts(model))
    total = sum(count for count, _ in counts)
    return sum(count for count, is_quantized in counts if is_quantized) / total if total else 0.0


def _weights(module: nn.Module) -> int:
    """Weights of a linear layer, of whatever kind; 0 for other modules."""
    if isinstance(module, (nn.Linear, QuantizedLinear)):
        return module.in_features * module.out_features
    return module.weight.numel() if isinstance(module, Conv1D) else 0  # GPT-2's linear layer


def _quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def _own_tables(model: nn.Module) -> list[nn.Embedding]:
    """Embeddings with a table that is not also a head's."""
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.numel()]
    return [table for table in tables if table.weight.data_ptr() not in heads]


def _outer_modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules but the libraries' own inside a quantized layer."""
    inner = {id(m) for layer in _quantized_layers(model) for m in layer.modules() if m is not layer}
    return (module for module in model.modules() if id(module) not in inner)


def _counts(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """How many numbers each tensor of weights stands for, and whether it is quantized."""
    inside = {id(p) for layer in _quantized_layers(model) for p in layer.parameters() if p is not layer.bias}
    for layer in _quantized_layers(model):
        yield layer.in_features * layer.out_features, True
        inner_bias = [p for name, p in layer.named_parameters() if name.endswith(".bias")]
        yield from ((bias.numel(), False) for bias in inner_bias)
    for parameter in model.parameters():
        if id(parameter) not in inside:
            state = getattr(parameter, "quant_state", None)  # bitsandbytes' own modules
            count = parameter.numel() if state is None else state.shape.numel()
            is_quantized = state is not None or hasattr(parameter, "qtype")  # optimum-quanto's
            yield count, is_quantized or parameter.dtype is torch.int8


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            yield from _parts(tensor)
            # bitsandbytes keeps scales and tables in objects beside the packed weight, or on the module
            yield from _tensors_in(getattr(tensor, "quant_state", None))
            yield from _attributes(tensor, "CB", "SCB")
        yield from _tensors_in(getattr(module, "quant_state", None))
        yield from _attributes(getattr(module, "state", None), "CB", "SCB")


def _attributes(owner: object, *names: str) -> Iterator[Tensor]:
    values = (getattr(owner, name, None) for name in names)
    return (value for value in values if isinstance(value, Tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a library's tensor is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _tensors_in(state: object) -> Iterator[Tensor]:
    for value in vars(state).values() if hasattr(state, "__dict__") else ():
        if isinstance(value, Tensor):
            yield value
        elif type(value) is type(state):  # nested quantization of the scales
            yield from _tensors_in(value)
