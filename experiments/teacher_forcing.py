"""Texts read through a model's cache, whatever the model itself would have written: its logits at every position.

Read as decoding reads: the given tokens as a prompt, then passes of a few, with a commit after each, so that a KV store
packs what is final and is read packed. One forward over a whole text would never show what that costs.
Tokens of one pass see each other before they are packed: passes of one token are exactly how plain decoding reads.
Several models read side by side, window by window: of no text are the logits of all positions held at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kv_cache import CacheView
from specdec.runner import Runner


@dataclass(frozen=True)
class ForcedText:
    """The first `num_given` tokens are read as a prompt; at the positions of the others laws are compared."""

    token_ids: tuple[int, ...]
    num_given: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_given < len(self.token_ids):
            raise ValueError(
                f"{self.num_given} given of {len(self.token_ids)} tokens: expected at least one, and one more"
            )

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_given


@dataclass(frozen=True)
class Window:
    """Neighbouring positions of a text: logits `[N, V]` by reader, those at n are behind token `start + n - 1`."""

    start: int
    next_ids: tuple[int, ...]
    logits: Mapping[str, Tensor]


class Reader:
    """One model with slot 0 of its cache, that reads in passes of `chunk` tokens.

    With a view of another reader's cache it reads before that one, and goes on each time from where that one is.
    """

    def __init__(self, runner: Runner, chunk: int) -> None:
        self.runner = runner
        self.chunk = chunk

    def begin(self, token_ids: Sequence[int]) -> Tensor:
        """Read the given tokens: logits `[1, V]` behind them."""
        logits = self.runner.prefill([token_ids], [0])
        self._follow()
        return logits

    def go_on(self, token_ids: Sequence[int]) -> Tensor:
        """Read what follows: logits `[N, V]`, one row behind each token."""
        tokens = torch.tensor([token_ids], device=self.runner.device)
        logits = torch.cat([self._pass(part) for part in tokens.split(self.chunk, dim=1)])
        self._follow()
        return logits

    def end(self) -> None:
        self.runner.release(0)

    def _follow(self) -> None:
        if isinstance(getattr(self.runner, "cache", None), CacheView):
            self.runner.release(0)  # what it wrote there itself

    def _pass(self, tokens: Tensor) -> Tensor:
        logits = self.runner.verify(tokens, [tokens.shape[1]])[0]
        self.runner.commit([self.runner.lengths[0]])
        return logits


def read_together(readers: Mapping[str, Reader], text: ForcedText) -> Iterator[Window]:
    """The text, read by each: the position behind the given tokens, then those that the widest pass covers."""
    tokens, width = text.token_ids, max(reader.chunk for reader in readers.values())
    first = text.num_given
    last = len(tokens) - 1  # it is only predicted, never read
    borders = [*range(first, last, width), last]
    try:
        logits = {name: reader.begin(tokens[:first]) for name, reader in readers.items()}
        yield Window(first, tokens[first : first + 1], logits)
        for start, end in pairwise(borders):
            logits = {name: reader.go_on(tokens[start:end]) for name, reader in readers.items()}
            yield Window(start + 1, tokens[start + 1 : end + 1], logits)
    finally:  # also when a reader fails, or the caller stops early
        for reader in readers.values():
            reader.end()
