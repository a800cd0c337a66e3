"""Draft with a smaller or cheaper model (Leviathan et al. 2023, algorithm 1).

It has a cache of its own, or goes on from the target's where it is a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.runner import ModelRunner, Runner
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Law, Prospect, Verification

MODELS = ("draft", "target")
CACHES = ("auto", "own", "target")


class DraftModelDrafter(Drafter):
    """Draws each draft token from the draft model's law, one pass per token.

    Between steps its cache holds a prefix of each row's text; what is missing (a new prompt, the last accepted
    draft token, tokens written while nothing was drafted) is read by the next proposal.
    """

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self.runner = runner
        self.sampler = sampler

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        drafting = [limit > 0 for limit in limits]  # rows that may still draw a token
        if not any(drafting):
            return DraftProposal.nothing(len(rows), self.runner.device)
        self._prefill_new(rows, drafting)
        logits = self._catch_up(rows, drafting)
        lengths = [0] * len(rows)
        token_ids: list[Tensor] = []
        laws: list[Law] = []
        while True:
            drafting = [on and go for on, go in zip(drafting, go_on(logits, len(laws)), strict=True)]
            if not any(drafting):
                break
            law = self.sampler.law(logits, rows, torch.stack(token_ids, 1) if token_ids else None)
            token_ids.append(draws.draft(law, len(laws)))
            laws.append(law)
            lengths = [length + on for length, on in zip(lengths, drafting, strict=True)]
            # The last draft token of a row is not read here: if it is accepted, the next proposal catches up.
            drafting = [on and limit > len(laws) for on, limit in zip(drafting, limits, strict=True)]
            if not any(drafting):
                break
            logits = self.runner.decode(token_ids[-1].unsqueeze(1), list(map(int, drafting)))
        if not laws:
            return DraftProposal.nothing(len(rows), self.runner.device)
        return DraftProposal(torch.stack(token_ids, 1), tuple(lengths), Law.stack(laws))

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        valid = [len(row.token_ids) + kept for row, kept in zip(rows, verification.accepted, strict=True)]
        held = self.runner.lengths
        self.runner.commit([min(length, held[slot]) for slot, length in enumerate(valid)])

    def prospects(self, rows: Sequence[Row]) -> Sequence[Prospect]:
        held = self.runner.lengths
        return [Prospect(unread=len(row.token_ids) - 1 - held[row.slot]) for row in rows]

    def vacate(self, vacancy: Vacancy) -> None:
        self.runner.release(vacancy.slot)
        if vacancy.replacement is not None:
            self.runner.move(vacancy.replacement, vacancy.slot)

    def _prefill_new(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        held = self.runner.lengths
        new = [row for row in rows if wanted[row.slot] and held[row.slot] == 0]
        if new:
            self.runner.prefill([row.token_ids[:-1] for row in new], [row.slot for row in new])

    def _catch_up(self, rows: Sequence[Row], wanted: Sequence[bool]) -> Tensor:
        """Read what each row's cache lacks of its text: logits `[B, V]` behind the newest token."""
        held = self.runner.lengths
        missing = [row.token_ids[held[row.slot] :] if wanted[row.slot] else [] for row in rows]
        width = max(map(len, missing))
        padded = [[*tokens, *([0] * (width - len(tokens)))] for tokens in missing]
        tokens = torch.tensor(padded, device=self.runner.device)
        return self.runner.decode(tokens, [len(tokens) for tokens in missing])


@dataclass
class DraftModelOptions(DrafterOptions):
    """`weights`: the draft model's weight format; empty: the default for that draft model.

    `model`: `draft` is the draft model, or where none is configured a copy of the target; `target` is that copy, and no
    draft model may be configured.
    `cache`: the draft model's `own`, or the `target`'s where the draft model is a copy of the target, which then has
    nothing to read before it drafts; `auto` is the target's where that is possible.
    """

    weights: str = ""
    model: str = "draft"
    cache: str = "auto"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"drafter.model={self.model}: expected {' or '.join(MODELS)}")
        if self.cache not in CACHES:
            raise ValueError(f"drafter.cache={self.cache}: expected one of {', '.join(CACHES)}")

    def build(self, context: DrafterContext) -> DraftModelDrafter:
        is_copy = context.draft_is_target or self.model == "target"
        if self.cache == "target" and not is_copy:
            raise ValueError(
                "drafter.cache=target: the draft model is no copy of the target; expected auto or own"
            )
        load = context.load_target_copy if self.model == "target" else context.load_draft_model
        model = load(self.weights)
        if model.config.vocab_size < context.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {model.config.vocab_size} tokens, "
                f"the target one of {context.vocab_size}: laws must be over tokens that both have"
            )
        try:
            runner = ModelRunner(
                model,
                context.num_slots,
                context.capacity,
                prefill_chunk=context.prefill_chunk,
                vocab_size=context.vocab_size,
                cache=context.target_cache.view() if is_copy and self.cache != "own" else None,
            )
        except ValueError as error:
            raise ValueError(f"the draft model can't be used: {error}") from error
        return DraftModelDrafter(runner, context.sampler)
