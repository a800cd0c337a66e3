"""A model whose laws are a table written by hand, and one place where tests assemble decoders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoding.autoregressive import AutoregressiveDecoder
from specdec.decoding.base import Decoder, DecodingParts
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.base import DraftLength
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.draws import Draws, KeyedDraws
from specdec.law_runner import LawOf, LawRunner
from specdec.progress import Row, StopTokens
from specdec.runner import ModelRunner, Runner
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams, StepOutput
from specdec.verifiers.base import Verifier
from specdec.verifiers.token import TokenVerifier

CPU = torch.device("cpu")
ToyRunner = LawRunner


def chain(table: Sequence[Sequence[float]]) -> LawOf:
    """A Markov chain: the law of the next token is row `newest token` of the table."""
    return lambda text: table[text[-1]]


def script(tokens: Sequence[int], vocab_size: int, prompt_length: int) -> LawOf:
    """A greedy model that writes `tokens` behind a prompt of the given length, whatever was accepted so far."""

    def law(text: Sequence[int]) -> list[float]:
        index = len(text) - prompt_length
        certain = tokens[index % len(tokens)] if index >= 0 else 0
        return [float(token == certain) for token in range(vocab_size)]

    return law


class Keeping(Sampler):
    """A greedy sampler that keeps the logits `[V]` behind each text, as (request, tokens before) -> logits."""

    def __init__(self) -> None:
        super().__init__(SamplingParams())
        self.seen: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def scores(self, logits: Tensor, rows: Sequence[Row], drafts: Tensor | None = None) -> Tensor:
        drafted = [[] for _ in rows] if drafts is None else drafts.tolist()
        positions = logits.unsqueeze(1) if logits.dim() == 2 else logits
        for row, tokens, laws in zip(rows, drafted, positions, strict=True):
            for count, one in enumerate(laws):
                self.seen[row.request.request_id, (*row.token_ids, *tokens[:count])] = one
        return logits


def build_decoder(
    runner: Runner,
    *,
    num_slots: int,
    drafter: Drafter | None = None,
    draft_length: int | DraftLength = 4,
    verifier: Verifier | None = None,
    temperature: float = 0.0,
    sampler: Sampler | None = None,
    draws: Draws | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> Decoder:
    """A speculative decoder, or an autoregressive one where there is no drafter."""
    sampler = Sampler(SamplingParams(temperature), stop_ids) if sampler is None else sampler
    parts = DecodingParts(
        runner,
        sampler,
        KeyedDraws(seed) if draws is None else draws,
        StopTokens(stop_ids),
        num_slots,
        drafter=drafter,
        verifier=TokenVerifier() if verifier is None else verifier,
        draft_length=FixedDraftLength(draft_length) if isinstance(draft_length, int) else draft_length,
    )
    return AutoregressiveDecoder(parts) if drafter is None else SpeculativeDecoder(parts)


def model_drafter(
    model: PreTrainedModel, num_slots: int, capacity: int, temperature: float = 0.0
) -> DraftModelDrafter:
    return DraftModelDrafter(ModelRunner(model, num_slots, capacity), Sampler(SamplingParams(temperature)))


def toy_drafter(
    law_of: LawOf, vocab_size: int, num_slots: int, temperature: float = 0.0
) -> DraftModelDrafter:
    runner = ToyRunner(law_of, vocab_size, num_slots)
    return DraftModelDrafter(runner, Sampler(SamplingParams(temperature)))


def requests_for(prompts: Sequence[Sequence[int]], limits: int | Sequence[int]) -> list[Request]:
    limits = [limits] * len(prompts) if isinstance(limits, int) else limits
    return [Request(i, tuple(prompt), limits[i]) for i, prompt in enumerate(prompts)]


def collect(steps: Iterable[StepOutput]) -> dict[int, list[int]]:
    """The new tokens of each request."""
    texts: dict[int, list[int]] = {}
    for step in steps:
        for request_id, tokens in zip(step.request_ids, step.committed, strict=True):
            texts.setdefault(request_id, []).extend(tokens)
    return texts
