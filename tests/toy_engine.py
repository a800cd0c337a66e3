"""A model whose laws are a table written by hand, and one place where tests assemble decoders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

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
from specdec.progress import StopTokens
from specdec.runner import ModelRunner, Runner
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams, StepOutput
from specdec.verifiers.base import Verifier
from specdec.verifiers.token import TokenVerifier

CPU = torch.device("cpu")
# The law of the next token as a function of the whole text so far.
LawOf = Callable[[Sequence[int]], Sequence[float]]


class ToyRunner:
    """The runner protocol over hand-written laws: logits are their logarithms, in float64.

    Logits that the protocol calls arbitrary (padding, rows with count 0) claim that the last token of the
    vocabulary is certain, so an engine that looks at one of them writes wrong text. `passes` records each pass:
    the verb, and the tokens every row read.
    """

    def __init__(self, law_of: LawOf, vocab_size: int, num_slots: int) -> None:
        self.law_of = law_of
        self.prefill_chunk: int | None = None
        self._arbitrary = torch.full((vocab_size,), -torch.inf, dtype=torch.float64)
        self._arbitrary[-1] = 0.0
        self.device = CPU
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


def build_decoder(
    runner: Runner,
    *,
    num_slots: int,
    drafter: Drafter | None = None,
    draft_length: int | DraftLength = 4,
    verifier: Verifier | None = None,
    temperature: float = 0.0,
    draws: Draws | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> Decoder:
    """A speculative decoder, or an autoregressive one where there is no drafter."""
    sampler = Sampler(SamplingParams(temperature))
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
