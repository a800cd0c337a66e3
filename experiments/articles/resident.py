"""What tensors really take: a fresh allocation is a promise, memory is there once it was written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from experiments.articles.lab import Lab, limits
from experiments.memory import return_freed_memory
from specdec.hf_adapter import HFAdapter


def resident_kv_bytes(lab: Lab, rows: int, capacity: int) -> int:
    """Memory that a cache of that size takes when all of it was written; it is given back. Raises LimitError."""
    lab.check_fits(rows, capacity)
    shape = HFAdapter(lab.model).cache_shape(rows, capacity)
    # Memory that was freed and kept would be taken again, and not be seen.
    gc.collect()
    return_freed_memory()
    before = _held_bytes(lab.device)
    with limits():
        store = lab.arm.kv.build(shape)
        for tensor in tensors_in(store):
            tensor.zero_()
    return _held_bytes(lab.device) - before


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors that an object holds, in its attributes and in lists and dictionaries of them; each once."""
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            left += vars(one).values()


def _held_bytes(device: torch.device) -> int:
    """By the process's own count: resident pages, or what the allocator of the GPU has handed out."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
