"""Draft by copying: what followed the text's last n-gram where it occurred before.

Source: A. Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.draws import BlockDraws
from specdec.progress import Row
from specdec.types import DraftProposal, GoOn

PREFERENCES = ("recent", "frequent")


class PromptLookupDrafter(Drafter):
    """Matches the longest of the n-grams `max_ngram..min_ngram` at the end of a row's own text.

    Of several occurrences the most recent one is copied, or (`prefer="frequent"`) the most recent of those with the
    most frequent next token, and a copy that reaches the end of the text goes on with
    what it has copied itself (as in LZ77), so that a repeated phrase is drafted at full length. The draft is certain
    (a one-hot law), so `go_on`, which looks at laws, is not asked.
    """

    def __init__(self, min_ngram: int, max_ngram: int, device: torch.device, prefer: str = "recent") -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.prefer = prefer
        self.device = device

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        return DraftProposal.certain(self.copies(rows, limits), self.device)

    def copies(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Sequence[int]]:
        """What would be proposed, as token ids per row."""
        return [self._continuation(row.token_ids, limit) for row, limit in zip(rows, limits, strict=True)]

    def _continuation(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        if limit < 1:
            return []
        for size in range(min(self.max_ngram, len(token_ids) - 1), self.min_ngram - 1, -1):
            start = self._occurrence(token_ids, size)
            if start is not None:
                return _copy(token_ids, start + size, limit)
        return []

    def _occurrence(self, token_ids: Sequence[int], size: int) -> int | None:
        """Start of the earlier occurrence of the last `size` tokens that is to be copied."""
        if self.prefer == "recent":
            return next(_occurrences(token_ids, size), None)
        starts = list(_occurrences(token_ids, size))
        if not starts:
            return None
        # Ties go to the token seen last, since the starts come most recent first.
        ((token, _),) = Counter(token_ids[start + size] for start in starts).most_common(1)
        return next(start for start in starts if token_ids[start + size] == token)


def _copy(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    period = len(token_ids) - start
    return [token_ids[start + offset % period] for offset in range(count)]


def _occurrences(token_ids: Sequence[int], size: int) -> Iterator[int]:
    """Starts of the earlier occurrences of the last `size` tokens, most recent first."""
    pattern, last = token_ids[-size:], token_ids[-1]
    for start in range(len(token_ids) - size - 1, -1, -1):
        if token_ids[start + size - 1] == last and token_ids[start : start + size] == pattern:
            yield start


@dataclass
class PromptLookupOptions(DrafterOptions):
    """N-grams of `max_ngram` down to `min_ngram` tokens are looked up; `prefer`: the recent or the frequent one."""

    min_ngram: int = 1
    max_ngram: int = 3
    prefer: str = "recent"

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: expected 1 <= min <= max"
            )

        if self.prefer not in PREFERENCES:
            raise ValueError(f"prefer={self.prefer}: expected one of {', '.join(PREFERENCES)}")

    def build(self, context: DrafterContext) -> PromptLookupDrafter:
        return PromptLookupDrafter(self.min_ngram, self.max_ngram, context.device, self.prefer)
