"""Draft with the target itself, some of its layers left out.

Sources: Zhang et al. 2023, "Draft & Verify" (arXiv 2309.08168); Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710). A
model that was not trained for it loses much without any of its layers, and a small one nearly everything.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.drafters.base import DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.runner import ModelRunner


def without_layers(model: PreTrainedModel, keep: int) -> PreTrainedModel:
    """The same modules, weights shared, with `keep` of the layers: the first and last ones, the middle left out.

    Raises ValueError where the model's layers can't be found, or are of several kinds.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"layer_skip: a '{model.config.model_type}' model has no list model.layers")
    if len(set(getattr(model.config, "layer_types", None) or [""])) > 1:
        raise ValueError("layer_skip: the model's layers are of several kinds")
    if not 1 <= keep <= len(layers):
        raise ValueError(f"drafter.keep_layers={keep}: expected 1 to {len(layers)}, the model's layers")
    first = (keep + 1) // 2
    kept = [*layers[:first], *layers[len(layers) - (keep - first) :]]
    shallow: Any = _shallow(model)
    shallow.model = _shallow(model.model)
    shallow.model.layers = nn.ModuleList(kept)
    return shallow


def _shallow(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and children, and can be given other children."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


@dataclass
class LayerSkipOptions(DrafterOptions):
    """`keep_layers`: how many of the target's layers draft; 0 is half of them."""

    keep_layers: int = 0

    def build(self, context: DrafterContext) -> DraftModelDrafter:
        target = context.target
        keep = self.keep_layers or max(1, target.config.num_hidden_layers // 2)
        runner = ModelRunner(
            without_layers(target, keep),
            context.num_slots,
            context.capacity,
            prefill_chunk=context.prefill_chunk,
            vocab_size=context.vocab_size,
            # The layers that are kept read and write the keys and values of those very layers.
            cache=context.target_cache.view(keep),
        )
        return DraftModelDrafter(runner, context.sampler)
