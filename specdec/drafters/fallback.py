"""Copy from the text where it offers something, else ask a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from specdec.drafters.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.types import DraftProposal, GoOn, Law, Verification


class FallbackDrafter(Drafter):
    """Per row: the copy if it has at least `min_copied` tokens (or all that were wanted), else the model's draft.

    Rows of one step may differ in that, so the laws of the step are dense or one-hot together: a copied token of a
    sampled batch gets the dense law that is certain of it.
    """

    def __init__(self, lookup: PromptLookupDrafter, model: DraftModelDrafter, min_copied: int) -> None:
        self.lookup = lookup
        self.model = model
        self.min_copied = min_copied

    @property
    def runner(self) -> object:
        """The draft model's, for whoever times its passes."""
        return self.model.runner

    @runner.setter
    def runner(self, runner: object) -> None:
        self.model.runner = runner  # type: ignore[assignment]

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        copied = self.lookup.propose(rows, limits, go_on, draws)
        is_copied = [
            length >= min(self.min_copied, limit)
            for length, limit in zip(copied.lengths, limits, strict=True)
        ]
        wanted = [0 if copy else limit for copy, limit in zip(is_copied, limits, strict=True)]
        if not any(wanted):
            return copied
        modelled = self.model.propose(rows, wanted, go_on, draws)
        return _merged(copied, modelled, is_copied)

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self.model.accept(rows, verification)

    def vacate(self, vacancy: Vacancy) -> None:
        self.model.vacate(vacancy)


def _merged(copied: DraftProposal, modelled: DraftProposal, is_copied: Sequence[bool]) -> DraftProposal:
    """Each row's tokens, length and laws from one of the two."""
    lengths = tuple(
        one if copy else other
        for copy, one, other in zip(is_copied, copied.lengths, modelled.lengths, strict=True)
    )
    width = max(lengths)
    from_copy = torch.tensor(is_copied, device=copied.token_ids.device).unsqueeze(1)
    token_ids = torch.where(from_copy, _wide(copied.token_ids, width), _wide(modelled.token_ids, width))
    if modelled.laws.probs is None:
        return DraftProposal(token_ids, lengths, Law(ids=token_ids))
    probs = modelled.laws.probs.new_zeros((*token_ids.shape, modelled.laws.probs.shape[-1]))
    probs.scatter_(-1, token_ids.unsqueeze(-1), 1.0)
    reach = min(width, modelled.token_ids.shape[1])
    own = ~from_copy.expand(-1, reach)
    probs[:, :reach][own] = modelled.laws.probs[:, :reach][own]
    return DraftProposal(token_ids, lengths, Law(probs=probs))


def _wide(token_ids: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(token_ids[:, :width], (0, max(0, width - token_ids.shape[1])))


@dataclass
class FallbackOptions(DrafterOptions):
    """`weights` and `model` are those of `draft_model`, the n-grams those of `prompt_lookup`."""

    min_copied: int = 2
    min_ngram: int = 2
    max_ngram: int = 4
    weights: str = ""
    model: str = "draft"

    def __post_init__(self) -> None:
        DraftModelOptions(self.weights, self.model)
        PromptLookupOptions(self.min_ngram, self.max_ngram)
        if self.min_copied < 1:
            raise ValueError(f"min_copied={self.min_copied}: expected at least 1")

    def build(self, context: DrafterContext) -> FallbackDrafter:
        lookup = PromptLookupOptions(self.min_ngram, self.max_ngram).build(context)
        return FallbackDrafter(
            lookup, DraftModelOptions(self.weights, self.model).build(context), self.min_copied
        )
