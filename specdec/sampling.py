"""Logits to law, exactly once, for the target and the draft model alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from specdec.processors import (
    BadWords,
    CountPenalties,
    LogitBias,
    MinNewTokens,
    Processor,
    RepetitionPenalty,
    Text,
)
from specdec.progress import Row
from specdec.types import Law, SamplingParams

Cut = Callable[[Tensor], Tensor]  # probabilities [N, V] to a mask of the tokens that stay


class Sampler:
    """Turns logits into laws under one set of sampling parameters.

    Args:
        stop_ids: tokens that end an answer, which `min_new_tokens` bans until it is long enough.
        processors: a user's own, applied behind the built-in ones and before the temperature.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Collection[int] = (),
        processors: Sequence[Processor] = (),
    ) -> None:
        self.params = params
        self._processors = [*_built_in(params, stop_ids), *processors]
        self._cuts = _cuts(params)

    def law(self, logits: Tensor, rows: Sequence[Row], drafts: Tensor | None = None) -> Law:
        """Laws `[B]` of `logits [B, V]`, or `[B, T]` of `logits [B, T, V]`; in float32 or wider.

        Args:
            rows: whose texts stand before the positions.
            drafts: draft tokens `[B, K]` behind the texts. Logits `[B, V]` are those behind all of them; of logits
                `[B, T, V]`, T = K + 1, those at t are behind the first t.

        Greedy takes the first of equal largest logits, on every path: this is the only argmax over logits.
        """
        scores = self.scores(logits, rows, drafts)
        # Also for greedy: torch's argmax of 16-bit numbers takes four times as long as that of 32-bit ones on a CPU.
        wide = scores if scores.dtype == torch.float64 else scores.float()
        if self.params.temperature == 0:
            return Law(ids=wide.argmax(-1))
        probs = torch.softmax(wide / self.params.temperature, -1)
        for cut in self._cuts:
            probs = torch.where(cut(probs), probs, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return Law(probs=probs)

    def scores(self, logits: Tensor, rows: Sequence[Row], drafts: Tensor | None = None) -> Tensor:
        """The logits after penalties, biases and bans; arguments as of `law`."""
        if not self._processors:
            return logits
        changed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        flat = changed.reshape(-1, changed.shape[-1])
        texts = _texts(rows, drafts, None if logits.dim() == 2 else logits.shape[1])
        for processor in self._processors:
            flat = processor(flat, texts)
        return flat.reshape(logits.shape)


def _texts(rows: Sequence[Row], drafts: Tensor | None, width: int | None) -> list[Text]:
    """The text before each position, row by row; a single position per row where `width` is None."""
    drafted = [[] for _ in rows] if drafts is None else drafts.tolist()
    texts = []
    for row, tokens in zip(rows, drafted, strict=True):
        for count in [len(tokens)] if width is None else range(width):
            before = [*row.token_ids, *tokens[:count]]
            texts.append(Text(row.request.request_id, before, len(row.request.prompt_ids)))
    return texts


def _built_in(params: SamplingParams, stop_ids: Collection[int]) -> list[Processor]:
    found: list[Processor] = []
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias)))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenalty(params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:
        found.append(CountPenalties(params.frequency_penalty, params.presence_penalty))
    if params.bad_words:
        found.append(BadWords(params.bad_words))
    if params.min_new_tokens:
        found.append(MinNewTokens(params.min_new_tokens, frozenset(stop_ids)))
    return found


def _cuts(params: SamplingParams) -> list[Cut]:
    """In the order of transformers; each sees the probabilities that the one before left, normalized."""
    found: list[Cut] = []
    if params.top_k:
        found.append(lambda probs: _top_k(probs, params.top_k))
    if params.top_p < 1:
        found.append(lambda probs: _top_p(probs, params.top_p))
    if params.min_p:
        found.append(lambda probs: probs >= params.min_p * probs.amax(-1, keepdim=True))
    if params.typical_p < 1:
        found.append(lambda probs: _typical(probs, params.typical_p))
    return found


def _top_k(probs: Tensor, count: int) -> Tensor:
    """The `count` most probable tokens, and all that are as probable as the last of them (Fan et al. 2018)."""
    least = probs.topk(min(count, probs.shape[-1]), -1).values[..., -1:]
    return probs >= least


def _top_p(probs: Tensor, mass: float) -> Tensor:
    """The fewest most probable tokens that have a mass of at least `mass` together (Holtzman et al. 2020)."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < mass)


def _typical(probs: Tensor, mass: float) -> Tensor:
    """The tokens of least surprise difference from the law's entropy (Meister et al. 2023, arXiv 2202.00666)."""
    surprise = -probs.log()
    entropy = torch.where(probs > 0, probs * surprise, 0.0).sum(-1, keepdim=True)
    distance = torch.where(probs > 0, (surprise - entropy).abs(), float("inf"))
    order = distance.sort(dim=-1, stable=True).indices
    ordered = probs.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < mass)
