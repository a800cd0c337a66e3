"""Bytes as stored: a walk over tensors, since libraries leave scales out or report unquantized sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quant.weights.base import QuantizedLinear


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers with their scales; each storage counts once (a tied head is one)."""
    storages = {}
    for tensor in _tensors(model):
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def read_bytes_per_pass(model: nn.Module) -> int:
    """Bytes of weights that a pass over one token reads.

    Everything stored, but of an embedding table that is not also the head only one row.
    """
    total = stored_bytes(model)
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.data_ptr() not in heads:
            total -= module.weight.nbytes - module.weight[0].nbytes
    return total


def embedding_row_bytes(model: nn.Module) -> int:
    """Bytes that each further token of a pass reads of embedding tables; 0 where the table is also the head."""
    heads = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.data_ptr() not in heads]
    return sum(table.weight[0].nbytes for table in tables)


def multiplied_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Weights that every token is multiplied with: in the layers, and in the head (run where logits are wanted).

    Counted as numbers, however they are stored.
    """
    head = model.get_output_embeddings()
    body = sum(_weights(module) for module in model.modules() if module is not head)
    return body, _weights(head)


def _weights(module: nn.Module) -> int:
    """Weights of a linear layer, of whatever kind; 0 for other modules."""
    if isinstance(module, (nn.Linear, QuantizedLinear)):
        return module.in_features * module.out_features
    return module.weight.numel() if isinstance(module, Conv1D) else 0  # GPT-2's linear layer


def quantized_share(model: nn.Module) -> float:
    """Share of the parameters, counted as numbers, that are really quantized.

    Those with a bitsandbytes state, and the weights of this package's quantized layers.
    """
    quantized = total = 0
    seen = set()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            quantized += module.in_features * module.out_features
            total += module.in_features * module.out_features
        for parameter in module.parameters(recurse=False):
            if parameter.data_ptr() in seen:
                continue
            seen.add(parameter.data_ptr())
            state = getattr(parameter, "quant_state", None)
            count = state.shape.numel() if state is not None else parameter.numel()
            total += count
            quantized += count if state is not None else 0
    return quantized / total if total else 0.0


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        # bitsandbytes keeps scales and tables in an object beside the packed weight, or on the module
        weight = getattr(module, "weight", None)
        for state in (getattr(weight, "quant_state", None), getattr(module, "quant_state", None)):
            yield from _state_tensors(state)


def _state_tensors(state: object) -> Iterator[Tensor]:
    for value in vars(state).values() if hasattr(state, "__dict__") else ():
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) is type(state):  # nested quantization of the scales
            yield from _state_tensors(value)
