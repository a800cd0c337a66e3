"""How each linear layer will be stored, and which kernel will multiply by it: known before any weight is loaded.

A plan reads shapes only, so a model on the meta device will do. It is also what a conversion follows, layer by layer.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class LinearSite:
    """A linear layer of a model: where it is, and its shape as outputs x inputs.

    `embedding` is the name of the embedding whose weight it shares, `problem` why no format can hold it.
    """

    name: str
    outputs: int
    inputs: int
    is_head: bool = False
    embedding: str = ""
    problem: str = ""

    @property
    def pattern(self) -> str:
        """The name, with a star for each number: layers of one kind have one pattern."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.name)

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs


@dataclass(frozen=True)
class Setting:
    """What a format may choose a kernel by; `typical_shape` is that of the layers with most of the weights."""

    device: torch.device
    dtype: torch.dtype
    typical_shape: tuple[int, int]


@dataclass(frozen=True)
class Storage:
    """How one layer will be stored: the kernel, its bytes (scales and padding included, the bias not).

    `row_invariant` is the kernel's, see `quant.kernels.base`. `note`: what else there is to know of this layer.
    """

    kernel: str
    stored_bytes: int
    row_invariant: bool | None
    note: str = ""


class Format(Protocol):
    """What a plan asks of a weight format."""

    head: bool
    keep: list[str]

    def storage(self, site: LinearSite, setting: Setting) -> Storage:
        """Raises ValueError, in one line, for a layer that the format can't hold."""
        ...

    def choice(self, setting: Setting) -> str:
        """What kernels were chosen by, for people; empty where there was no choice."""
        ...


@dataclass(frozen=True)
class PlanRow:
    """One layer: how it will be stored, or why it is kept as it is."""

    site: LinearSite
    storage: Storage | None
    kept_bytes: int = 0
    why_kept: str = ""

    @property
    def num_weights(self) -> int:
        return self.site.outputs * self.site.inputs

    @property
    def bits_per_weight(self) -> float:
        """Scales included."""
        return 8 * (self.kept_bytes if self.storage is None else self.storage.stored_bytes) / self.num_weights

    @property
    def reason(self) -> str:
        return self.why_kept if self.storage is None else self.storage.note


@dataclass(frozen=True)
class WeightsPlan:
    """All linear layers of a model; `num_parameters` and `float_bytes` are those of everything, each tensor once.

    `choice` says what kernels were chosen by.
    """

    rows: Sequence[PlanRow]
    num_parameters: int
    float_bytes: int
    setting: Setting
    choice: str = ""

    @cached_property
    def quantized(self) -> list[PlanRow]:
        return [row for row in self.rows if row.storage is not None]

    @property
    def quantized_share(self) -> float:
        """Share of all parameters, counted as numbers."""
        return sum(row.num_weights for row in self.quantized) / self.num_parameters

    @property
    def stored_bytes(self) -> int:
        """Of all parameters; a model's buffers come on top."""
        saved = sum(
            row.num_weights * self.setting.dtype.itemsize - row.storage.stored_bytes
            for row in self.quantized
            if row.storage is not None
        )
        return self.float_bytes - saved

    @property
    def bits_per_weight(self) -> float:
        """Of all parameters, scales included."""
        return 8 * self.stored_bytes / self.num_parameters

    @property
    def kernels(self) -> list[str]:
        """What multiplies by quantized weights, most layers first."""
        found = Counter(row.storage.kernel for row in self.quantized if row.storage is not None)
        return [name for name, _ in found.most_common()]

    @property
    def row_invariant(self) -> bool | None:
        """Of all quantized layers; None where it isn't known of one and false of none."""
        found = {row.storage.row_invariant for row in self.quantized if row.storage is not None}
        return False if False in found else None if None in found or not found else True


def plan_weights(model: nn.Module, weights: Format, device: torch.device, dtype: torch.dtype) -> WeightsPlan:
    """What a format will do to a model of such weights.

    Raises ValueError, in one line, for a layer that the format can't hold, a pattern of `keep` that fits no layer, and
    a model of which nothing is left to quantize.
    """
    sites = linear_sites(model)
    _check_patterns(weights.keep, sites)
    kept = {site.name: _why_kept(site, weights) for site in sites}
    wanted = [site for site in sites if not kept[site.name]]
    if not wanted:
        raise ValueError(f"{_called(model)} has no linear layer to quantize{_reasons(kept)}")
    setting = Setting(device, dtype, _typical_shape(wanted))
    rows = [
        PlanRow(site, None, site.outputs * site.inputs * dtype.itemsize, kept[site.name])
        if kept[site.name]
        else PlanRow(site, _storage(weights, site, setting))
        for site in sites
    ]
    parameters = list(model.parameters())
    num_parameters = sum(parameter.numel() for parameter in parameters)
    return WeightsPlan(
        rows, num_parameters, num_parameters * dtype.itemsize, setting, weights.choice(setting)
    )


def linear_sites(model: nn.Module) -> list[LinearSite]:
    """All linear layers by name, GPT-2's Conv1D included."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    sites = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and isinstance(module.weight, nn.Parameter):
            others = [model.get_submodule(other) for other in owners[id(module.weight)] if other != name]
            embedding, problem = _shared(module, owners[id(module.weight)], name, others)
            outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
            sites.append(LinearSite(name, outputs, inputs, module is head, embedding, problem))
    return sites


@cache
def warn_once(message: str) -> None:
    """In the log, once per process: plans are made several times, and have many layers."""
    logging.getLogger(__name__).warning(message)


def _shared(
    module: nn.Module, owners: Sequence[str], name: str, others: Sequence[nn.Module]
) -> tuple[str, str]:
    """The embedding that shares the layer's weight, and why the layer can't be quantized: each may be empty."""
    if type(module) not in (nn.Linear, Conv1D):
        return "", f"a {type(module).__name__}, not a plain linear layer"
    other_names = [owner for owner in owners if owner != name]
    if not others:
        return "", ""
    if len(others) == 1 and isinstance(others[0], nn.Embedding):
        return other_names[0], ""
    return "", f"shares its weight with {', '.join(other_names)}"


def _why_kept(site: LinearSite, weights: Format) -> str:
    if site.problem:
        return site.problem
    if any(fnmatchcase(site.name, pattern) for pattern in weights.keep):
        return "weights.keep"
    return "weights.head=false" if site.is_head and not weights.head else ""


def _check_patterns(patterns: Sequence[str], sites: Sequence[LinearSite]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(site.name, pattern) for site in sites):
            known = dict.fromkeys(site.pattern for site in sites)
            raise ValueError(
                f"weights.keep={pattern}: no linear layer has such a name; there are {', '.join(known)}"
            )


def _storage(weights: Format, site: LinearSite, setting: Setting) -> Storage:
    try:
        return weights.storage(site, setting)
    except ValueError as error:
        raise ValueError(f"layer {site.name} ({site.outputs} x {site.inputs}): {error}") from error


def _typical_shape(sites: Sequence[LinearSite]) -> tuple[int, int]:
    weights: Counter[tuple[int, int]] = Counter()
    for site in sites:
        if not site.is_head or len(sites) == 1:
            weights[site.shape] += site.outputs * site.inputs
    return weights.most_common(1)[0][0]


def _called(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return f"a '{config.model_type}' model" if config is not None else "this model"


def _reasons(kept: dict[str, str]) -> str:
    found = dict.fromkeys(kept.values())
    return f" (kept: {'; '.join(found)})" if found else ""
