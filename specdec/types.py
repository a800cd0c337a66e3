"""Values that the engine passes around, all frozen.

Shape legend, used in every docstring of this package:
B rows of a pass, T tokens per row of a pass, K draft tokens, V vocabulary, S slots,
H query heads, KVH key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

# float32 logits up to 1e8 can be divided by it
SMALLEST_TEMPERATURE = 1e-30


class Phase(StrEnum):
    """What a pass of the target model is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature=0` is greedy: the one-hot law of the largest logit.

    Raises ValueError for a temperature that is negative, not finite, or so small that logits divided by it overflow.
    """

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: expected 0 (0 is greedy) "
                f"or a finite number >= {SMALLEST_TEMPERATURE}"
            )


@dataclass(frozen=True)
class Request:
    """One prompt to be answered.

    `request_id` keys the request's random draws, so two equal prompts in a batch get different samples,
    and the same request gets the same sample whatever its batch mates are.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id}: the prompt has no tokens")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: max_new_tokens={self.max_new_tokens}, expected >= 1"
            )

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True)
class Law:
    """One distribution over the vocabulary for each entry of a leading shape `[...]`.

    Either dense (`probs [..., V]`) or one-hot (`ids [...]`): greedy decoding is the one-hot case of the
    same code, and no dense one-hot of the vocabulary is ever built.
    """

    probs: Tensor | None = None
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.probs is None) == (self.ids is None):
            raise ValueError("a Law holds either dense probs or one-hot ids, exactly one of them")

    def prob(self, token_ids: Tensor) -> Tensor:
        """Probability of `token_ids [...]` under each law, float64 `[...]`."""
        if self.ids is not None:
            return (self.ids == token_ids).double()
        assert self.probs is not None
        return self.probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).double()

    def at(self, offset: int) -> Law:
        """The laws `[B]` at one offset of laws `[B, T]`."""
        return Law(
            probs=None if self.probs is None else self.probs[:, offset],
            ids=None if self.ids is None else self.ids[:, offset],
        )

    def take(self, offsets: Tensor) -> Law:
        """The law at `offsets [B]` of each row of laws `[B, T]`: laws `[B]`."""
        rows = torch.arange(offsets.shape[0], device=offsets.device)
        if self.ids is not None:
            return Law(ids=self.ids[rows, offsets])
        assert self.probs is not None
        return Law(probs=self.probs[rows, offsets])

    def residual(self, draft: Law) -> Law:
        """`max(target - draft, 0)`, normalized: the law of the recovered token after a rejection.

        Where nothing is left (both laws equal) it is the target law itself. Source: Leviathan et al. 2023
        (arXiv 2211.17192), section 2.3; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
        """
        if self.ids is not None:
            return self  # all mass on one token: either it remains, or nothing remains
        assert self.probs is not None
        target = self.probs.double()
        if draft.ids is not None:
            left = target.scatter(-1, draft.ids.unsqueeze(-1), 0.0)
        else:
            assert draft.probs is not None
            left = (target - draft.probs.double()).clamp_min(0.0)
        mass = left.sum(-1, keepdim=True)
        return Law(probs=torch.where(mass > 0, left / mass, target))

    @staticmethod
    def stack(laws: Sequence[Law]) -> Law:
        """Laws `[B]` of K offsets as laws `[B, K]`; all dense or all one-hot."""
        if all(law.ids is not None for law in laws):
            return Law(ids=torch.stack([law.ids for law in laws if law.ids is not None], 1))
        return Law(probs=torch.stack([law.probs for law in laws if law.probs is not None], 1))


@dataclass(frozen=True)
class DraftProposal:
    """Draft tokens for each row, and the very laws they were drawn from.

    `token_ids [B, K]`, `lengths [B]` (0..K each; what lies behind a row's length is padding) and
    `laws [B, K]`. `K` may be 0.
    """

    token_ids: Tensor
    lengths: tuple[int, ...]
    laws: Law

    @staticmethod
    def nothing(num_rows: int, device: torch.device) -> DraftProposal:
        """No draft token for any row: the step becomes plain decoding."""
        empty = torch.zeros((num_rows, 0), dtype=torch.long, device=device)
        return DraftProposal(empty, (0,) * num_rows, Law(ids=empty))

    @staticmethod
    def certain(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftProposal:
        """Draft tokens of a drafter that does not draw: its law is one-hot."""
        width = max(map(len, drafts), default=0)
        padded = [[*draft, *([0] * (width - len(draft)))] for draft in drafts]
        token_ids = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(drafts), width)
        return DraftProposal(token_ids, tuple(map(len, drafts)), Law(ids=token_ids))


@dataclass(frozen=True)
class Verification:
    """Per row: how many draft tokens were accepted, and the one token that follows them.

    `next_ids[b]` is the recovered token after a rejection, the bonus token after full acceptance.
    """

    accepted: tuple[int, ...]
    next_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepOutput:
    """What one step of a decoder committed: one entry per request that took part.

    `committed[i]` are the new tokens of request `request_ids[i]`, cut at its stop token or limit; the
    counts `drafted` and `accepted` leave out what lay behind the cut.
    """

    phase: Phase
    request_ids: tuple[int, ...]
    committed: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    finished: tuple[bool, ...]


# Sees a draft law [B] before its token is drawn, and the number of tokens drafted so far: go on, per row?
# The law of a row that has already stopped is arbitrary, and its answer is not used.
GoOn = Callable[[Law, int], Sequence[bool]]
