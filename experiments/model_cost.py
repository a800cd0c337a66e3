"""What passes of a runner's model have to move and compute, as its weights and its cache are stored."""

from __future__ import annotations

from typing import Any

from experiments.roofline import ModelCost
from quant.footprint import embedding_row_bytes, multiplied_parameters, read_bytes_per_pass


def model_cost(runner: Any) -> ModelCost:
    """Of a `ModelRunner`."""
    model = runner.model
    body, head = multiplied_parameters(model)
    cache, store = runner.cache, runner.cache.store
    shape, used = store.shape, cache.num_layers / store.shape.num_layers
    lengths = range(shape.capacity + 1)
    return ModelCost(
        weights_read_bytes=read_bytes_per_pass(model),
        embedding_row_bytes=embedding_row_bytes(model),
        # A draft model may have some of the target's layers only.
        kv_bytes_per_token=store.bytes_per_token * used,
        body_parameters=body,
        head_parameters=head,
        attention_width=cache.num_layers * model.config.num_attention_heads * shape.head_dim,
        kv_row_bytes=tuple(round(store.live_bytes([length]) * used) for length in lengths),
    )
