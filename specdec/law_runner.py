"""The runner protocol over laws written by hand: the engine without a model, for certificates and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The law of the next token as a function of the whole text so far.
LawOf = Callable[[Sequence[int]], Sequence[float]]


class LawRunner:
    """Logits are the laws' logarithms, in float64.

    Logits that the protocol calls arbitrary (padding, rows with count 0) claim that the last token of the
    vocabulary is certain, so an engine that looks at one of them writes wrong text. `passes` records each pass:
    the verb, and the tokens every row read.
    """

    def __init__(self, law_of: LawOf, vocab_size: int, num_slots: int) -> None:
        self.law_of = law_of
        self.vocab_size = vocab_size
        self.prefill_chunk: int | None = None
        self._arbitrary = torch.full((vocab_size,), -torch.inf, dtype=torch.float64)
        self._arbitrary[-1] = 0.0
        self.device = torch.device("cpu")
        self.texts: list[list[int]] = [[] for _ in range(num_slots)]
        self.passes: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.texts))

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        for prompt, slot in zip(prompts, slots, strict=True):
            assert not self.texts[slot], f"slot {slot} is not empty"
            self.texts[slot].extend(prompt)
        self.passes.append(("prefill", tuple(map(tuple, prompts))))
        return torch.stack([self._logits(self.texts[slot]) for slot in slots])

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        counts = [token_ids.shape[1]] * len(token_ids) if counts is None else counts
        logits = self._append("decode", token_ids, counts)
        return torch.stack([row[max(count - 1, 0)] for row, count in zip(logits, counts, strict=True)])

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        return self._append("verify", token_ids, counts)

    def commit(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self.texts, lengths, strict=False):
            assert 0 <= length <= len(text), f"{len(text)} tokens can't become {length}"
            del text[length:]

    def move(self, source: int, destination: int) -> None:
        self.texts[destination], self.texts[source] = self.texts[source], []

    def release(self, slot: int) -> None:
        self.texts[slot] = []

    def _append(self, verb: str, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        read = []
        logits = []
        for text, tokens, count in zip(self.texts, token_ids.tolist(), counts, strict=False):
            read.append(tuple(tokens[:count]))
            row = []
            for token in tokens[:count]:
                text.append(token)
                row.append(self._logits(text))
            logits.append(torch.stack(row + [self._arbitrary] * (len(tokens) - count)))
        self.passes.append((verb, tuple(read)))
        return torch.stack(logits)

    def _logits(self, text: Sequence[int]) -> Tensor:
        return torch.tensor(self.law_of(text), dtype=torch.float64).log()
