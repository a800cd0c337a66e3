"""Draft by copying: what followed the text's last n-gram where it occurred before.

Source: A. Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.draws import BlockDraws
from specdec.progress import Row
from specdec.types import DraftProposal, GoOn


class PromptLookupDrafter(Drafter):
    """Matches the longest of the n-grams `max_ngram..min_ngram` at the end of a row's own text.

    Of several occurrences the most recent one is copied, and a copy that reaches the end of the text goes on with
    what it has copied itself (as in LZ77), so that a repeated phrase is drafted at full length. The draft is certain
    (a one-hot law), so `go_on`, which looks at laws, is not asked.
    """

    def __init__(self, min_ngram: int, max_ngram: int, device: torch.device) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.device = device

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        drafts = [self._continuation(row.token_ids, limit) for row, limit in zip(rows, limits, strict=True)]
        return DraftProposal.certain(drafts, self.device)

    def _continuation(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        if limit < 1:
            return []
        for size in range(min(self.max_ngram, len(token_ids) - 1), self.min_ngram - 1, -1):
            start = _last_occurrence(token_ids, size)
            if start is not None:
                return _copy(token_ids, start + size, limit)
        return []


def _copy(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    period = len(token_ids) - start
    return [token_ids[start + offset % period] for offset in range(count)]


def _last_occurrence(token_ids: Sequence[int], size: int) -> int | None:
    """Start of the most recent earlier occurrence of the last `size` tokens."""
    pattern, last = token_ids[-size:], token_ids[-1]
    for start in range(len(token_ids) - size - 1, -1, -1):
        if token_ids[start + size - 1] == last and token_ids[start : start + size] == pattern:
            return start
    return None


@dataclass
class PromptLookupOptions(DrafterOptions):
    """N-grams of `max_ngram` down to `min_ngram` tokens are looked up."""

    min_ngram: int = 1
    max_ngram: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: expected 1 <= min <= max"
            )

    def build(self, context: DrafterContext) -> PromptLookupDrafter:
        return PromptLookupDrafter(self.min_ngram, self.max_ngram, context.device)
