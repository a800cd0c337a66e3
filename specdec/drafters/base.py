"""What a drafter is. A new one is one file in this folder: its options, and the class they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.draws import BlockDraws
from specdec.kv_cache import KVCache
from specdec.progress import Row, Vacancy
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Prospect, Verification


class Drafter(ABC):
    """Proposes draft tokens for the active rows, in slots 0..B-1.

    Row objects carry the whole committed text, so a drafter that keeps no state of its own needs `propose` only.
    """

    @abstractmethod
    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        """At most `limits[b]` draft tokens behind each row's text; fewer, or none, is always right.

        The tokens must have been drawn from the very laws reported. `go_on(logits, step)` is asked before each
        draw whether a row goes on; a drafter whose law is one-hot may ignore it.
        """

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        """The verdict on the last proposal; the rows' texts are still those the proposal was made for.

        Afterwards the drafter's state must agree with the text emitted: also after full acceptance, also after
        proposing nothing.
        """

    def prospects(self, rows: Sequence[Row]) -> Sequence[Prospect]:
        """What the next proposal would take, per row: for whoever decides whether to ask for one."""
        return [Prospect()] * len(rows)

    def vacate(self, vacancy: Vacancy) -> None:
        """A slot is empty, or the row of another slot moves into it."""


def _no_copies(weights: str) -> PreTrainedModel:
    raise ValueError(
        "drafter.model=target: there are no weight formats to copy to; pass the model itself as drafter"
    )


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may build on.

    `vocab_size` is the width of all laws: logits of a wider draft model are to be cut to it, which is right where both
    models' tokens are the same up to there (whoever makes the context has seen to it).

    `target` is the target model itself, for drafters that use its modules. `load_draft_model(weights)` loads the
    draft model in a weight format named by the caller's registry; "" is the caller's default for that model. Raises
    ValueError where no draft model is configured. `load_target_copy(weights)` is the same of the target, whatever draft
    model there is. `target_cache` is the cache that the target's passes fill, and `draft_is_target` says that the draft
    model is a copy of the target, which can go on from there. `prefill_chunk` is the target's: tokens per prefill pass,
    None for whole prompts.
    """

    num_slots: int
    capacity: int
    vocab_size: int
    device: torch.device
    sampler: Sampler
    target: PreTrainedModel
    load_draft_model: Callable[[str], PreTrainedModel]
    target_cache: KVCache
    draft_is_target: bool = False
    prefill_chunk: int | None = None
    load_target_copy: Callable[[str], PreTrainedModel] = _no_copies


@dataclass
class DrafterOptions(ABC):
    """Options of a drafter: plain typed fields with defaults, checked in `__post_init__`."""

    @abstractmethod
    def build(self, context: DrafterContext) -> Drafter: ...
