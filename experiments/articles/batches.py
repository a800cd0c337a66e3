"""Decode steps by batch: rows that decode together as the strategy does it, beside what theory says of their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.articles.lab import Floors, Lab, along
from experiments.articles.steps import DecodedSteps, decode_steps


@dataclass(frozen=True)
class Batches:
    """Steps and floors by rows; `limits` are batches that could not be had, with the reason."""

    steps: Mapping[int, DecodedSteps]
    floors: Mapping[int, Floors]
    limits: Mapping[str, str]


def measure_batches(lab: Lab, batches: Sequence[int], prompt_tokens: int, new_tokens: int) -> Batches:
    """Each row has read `prompt_tokens` and writes `new_tokens`; floors are of the step half way.

    Raises LimitError where no batch can be had.
    """
    steps, limits = along(batches, "batch", lambda batch: decode_steps(lab, batch, prompt_tokens, new_tokens))
    context = prompt_tokens + new_tokens // 2
    floors, _ = along(list(steps), "batch", lambda batch: lab.floors(batch, 1, context, kernels=True))
    return Batches(steps, floors, limits)
