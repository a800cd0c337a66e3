"""What penalties, biases and bans do to logits, position by position, given the true text before each.

A draft token that is verified at some position is part of the text of the positions behind it: counts and matches are
those that plain decoding would see there. The order is that of transformers' `generate`: bias, repetition, frequency
and presence, bad words, minimum length; then whatever a user adds; then temperature and the cuts (`sampling.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """All tokens before a position; the first `prompt_length` of them are the prompt's."""

    request_id: int
    token_ids: Sequence[int]
    prompt_length: int

    @property
    def answer_ids(self) -> Sequence[int]:
        return self.token_ids[self.prompt_length :]


class Processor(Protocol):
    """Changes logits `[N, V]`, one row per text, in place or not, and returns them."""

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor: ...


@dataclass(frozen=True)
class LogitBias:
    """Adds a number to the logits of some tokens; -inf bans them."""

    biases: Mapping[int, float]

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        ids = torch.tensor(list(self.biases), device=logits.device)
        added = torch.tensor(list(self.biases.values()), dtype=logits.dtype, device=logits.device)
        logits[:, ids] += added
        return logits


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides the positive logits of tokens that occur in the text by `penalty`, multiplies negative ones.

    The prompt's tokens count. Source: Keskar et al. 2019 (arXiv 1909.05858), section 4.1.
    """

    penalty: float

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        for row, text in zip(logits, texts, strict=True):
            seen = torch.tensor(sorted(set(text.token_ids)), device=logits.device)
            old = row[seen]
            row[seen] = torch.where(old < 0, old * self.penalty, old / self.penalty)
        return logits


@dataclass(frozen=True)
class CountPenalties:
    """Subtracts `frequency` for each time a token was written, and `presence` if it was at all.

    Only the answer's tokens count, as in OpenAI's API and vLLM.
    """

    frequency: float
    presence: float

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        for row, text in zip(logits, texts, strict=True):
            counts = Counter(text.answer_ids)
            if counts:
                ids = torch.tensor(list(counts), device=logits.device)
                times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
                row[ids] -= self.frequency * times + self.presence
        return logits


@dataclass(frozen=True)
class BadWords:
    """Bans the last token of a sequence wherever the text ends with the tokens before it."""

    sequences: Sequence[Sequence[int]]

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        for row, text in zip(logits, texts, strict=True):
            banned = [word[-1] for word in self.sequences if _ends_with(text.token_ids, word[:-1])]
            if banned:
                row[banned] = float("-inf")
        return logits


@dataclass(frozen=True)
class MinNewTokens:
    """Bans the tokens that would end an answer of fewer than `count` tokens."""

    count: int
    stop_ids: Collection[int]

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        stop_ids = sorted(self.stop_ids)
        for row, text in zip(logits, texts, strict=True):
            if len(text.token_ids) - text.prompt_length < self.count and stop_ids:
                row[stop_ids] = float("-inf")
        return logits


def _ends_with(token_ids: Sequence[int], tail: Sequence[int]) -> bool:
    return not tail or list(token_ids[-len(tail) :]) == list(tail)
