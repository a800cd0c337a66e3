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
from typing import Protocol

import torch
from torch import Tensor

# float32 logits up to 1e8 can be divided by it
SMALLEST_TEMPERATURE = 1e-30


class Phase(StrEnum):
    """What a pass of the target model is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class TokenKind(StrEnum):
    """How a token came to be written: it was drafted and stands, or it is the one that the target's pass adds.

    That one is recovered behind a rejected draft token, a bonus behind drafts that all stand, and plain where nothing
    was drafted.
    """

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True)
class Prospect:
    """What drafting for a row would take.

    Proposals of one `kind` cost alike and are accepted alike; `unread` tokens have to be read before the first one,
    such as a prompt that a draft model has not seen.
    """

    kind: str = ""
    unread: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature=0` is greedy: the one-hot law of the largest logit.

    Penalties, biases and bans change the logits first, greedy or not; then come temperature and the cuts `top_k` (0:
    none), `top_p`, `min_p`, `typical_p`, in this order, which leave a greedy choice as it is.

    Args:
        repetition_penalty: above 1 makes every token of prompt and answer less likely.
        frequency_penalty, presence_penalty: for tokens of the answer, each time and once.
        logit_bias: (token id, what is added to its logit) pairs.
        bad_words: sequences of token ids that are never completed.
        min_new_tokens: until then no stop token is chosen.

    Raises ValueError for a value out of range, such as a temperature so small that logits divided by it overflow.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        _check(
            self.temperature == 0 or SMALLEST_TEMPERATURE <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            f"0 (0 is greedy) or a finite number >= {SMALLEST_TEMPERATURE}",
        )
        _check(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0: all tokens)")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0, at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        _check(0 < self.typical_p <= 1, "typical_p", self.typical_p, "a number above 0, at most 1")
        penalty = self.repetition_penalty
        _check(0 < penalty < math.inf, "repetition_penalty", penalty, "a finite number above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        _check(self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, "at least 0")
        _check(all(self.bad_words), "bad_words", self.bad_words, "sequences of at least one token id")
        for token_id, bias in self.logit_bias:
            _check(bias < math.inf, "logit_bias", f"{token_id}: {bias}", "a number below infinity")


def _check(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value}: expected {expected}")


class StopRule(Protocol):
    """Where an answer ends, apart from its length limit."""

    def first_end(self, token_ids: Sequence[int], start: int) -> int | None:
        """Length at which the answer `token_ids` (without its prompt) ends, or None.

        Tokens before index `start` were looked at before and are not taken back: the length is beyond `start`.
        """
        ...


@dataclass(frozen=True)
class Request:
    """One prompt to be answered.

    `request_id` keys the request's random draws, so two equal prompts in a batch get different samples,
    and the same request gets the same sample whatever its batch mates are. `stop_rule` is this request's own, in the
    place of the decoder's.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_rule: StopRule | None = None

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

    def excess(self, draft: Law, scale: Tensor | None = None) -> Tensor:
        """`max(scale * target - draft, 0)`, summed over the vocabulary: float64 `[...]`; `scale [...]`, None is 1."""
        if self.ids is not None:
            kept = 1.0 if scale is None else scale
            return (kept - draft.prob(self.ids)).clamp_min(0.0)
        return self._left(draft, scale).sum(-1)

    def residual(self, draft: Law, scale: Tensor | None = None) -> Law:
        """`max(scale * target - draft, 0)`, normalized: the law of the recovered token after a rejection.

        Where nothing is left it is the target law itself. Sources: Leviathan et al. 2023 (arXiv 2211.17192), section
        2.3; Chen et al. 2023 (arXiv 2302.01318), algorithm 2; with `scale`, Sun et al. 2024 (arXiv 2403.10444),
        equation 4.
        """
        if self.ids is not None:
            return self  # all mass on one token: either it remains, or nothing remains
        assert self.probs is not None
        left = self._left(draft, scale)
        mass = left.sum(-1, keepdim=True)
        return Law(probs=torch.where(mass > 0, left / mass, self.probs.double()))

    def _left(self, draft: Law, scale: Tensor | None) -> Tensor:
        assert self.probs is not None
        target = self.probs.double()
        if scale is not None:
            target = target * scale.unsqueeze(-1)
        if draft.ids is not None:
            # A certain draft leaves of its token what exceeds 1: nothing.
            return target.scatter(-1, draft.ids.unsqueeze(-1), 0.0)
        assert draft.probs is not None
        return (target - draft.probs.double()).clamp_min(0.0)

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
    counts `drafted` and `accepted` leave out what lay behind the cut. `cut[i]`: something lay there, so the last of
    these tokens was drafted too, although it counts as the step's own.
    """

    phase: Phase
    request_ids: tuple[int, ...]
    committed: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    finished: tuple[bool, ...]
    cut: tuple[bool, ...]

    def kinds(self, index: int) -> tuple[TokenKind, ...]:
        """Of the tokens `committed[index]`."""
        accepted, drafted = self.accepted[index], self.drafted[index]
        if self.cut[index]:
            own = TokenKind.ACCEPTED
        elif not drafted:
            own = TokenKind.PLAIN
        else:
            own = TokenKind.RECOVERED if accepted < drafted else TokenKind.BONUS
        return (*[TokenKind.ACCEPTED] * accepted, own)


# Sees the draft model's logits [B, V] before a token is drawn, and the number of tokens drafted so far: go on, per row?
# (Logits, since the law of greedy decoding is always certain.) Those of a row that has already stopped are arbitrary,
# and the answer for it is not used.
GoOn = Callable[[Tensor, int], Sequence[bool]]
