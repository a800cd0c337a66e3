"""A user's transformers LogitsProcessors under speculation: called per row and position, on the true text of each.

A processor is given as a factory, called once per request. One whose result depends on the text and the logits alone
is used as it is: those of transformers that are known for it, or any that declares `stateless = True`. One with a state
must be able to go back (`snapshot()` and `restore(state)`), since rejected draft tokens never were. Others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.processors import Text

# Of transformers' own: those that look at nothing but their arguments.
KNOWN_STATELESS = frozenset(
    {
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
Factory = Callable[[Text], Any]


class UserProcessor:
    """One factory's processors, one per request, as a `Processor`.

    Raises ValueError, naming the class, for a processor that can't be used exactly.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._by_request: dict[int, _OneRequest] = {}

    def __call__(self, logits: Tensor, texts: Sequence[Text]) -> Tensor:
        for index, text in enumerate(texts):
            logits[index] = self._of(text).logits(text, logits[index])
        return logits

    def _of(self, text: Text) -> _OneRequest:
        known = self._by_request.get(text.request_id)
        # A request that begins anew (another block of a measurement) begins with a fresh processor.
        if known is None or not known.knows(text):
            known = self._by_request[text.request_id] = _OneRequest(self._factory(text), text)
        return known


class _OneRequest:
    def __init__(self, processor: Any, first: Text) -> None:
        self._processor = processor
        self._stateful = _is_stateful(processor)
        self._prompt = tuple(first.token_ids[: first.prompt_length])
        # State before the call at each length of text, from the prompt's on.
        self._states: list[Any] = [processor.snapshot()] if self._stateful else []

    def knows(self, text: Text) -> bool:
        return tuple(text.token_ids[: text.prompt_length]) == self._prompt

    def logits(self, text: Text, logits: Tensor) -> Tensor:
        if not self._stateful:
            return self._call(text.token_ids, logits)
        position = len(text.token_ids) - text.prompt_length
        # Positions at which no law was asked for (a drafter skips some): the state has to go through them too.
        for skipped in range(len(self._states) - 1, position):
            self._step(skipped, text.token_ids[: text.prompt_length + skipped], torch.zeros_like(logits))
        return self._step(position, text.token_ids, logits)

    def _step(self, position: int, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        self._processor.restore(self._states[position])
        changed = self._call(token_ids, logits)
        self._states[position + 1 :] = [self._processor.snapshot()]
        return changed

    def _call(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        input_ids = torch.tensor([list(token_ids)], device=logits.device)
        return self._processor(input_ids, logits.unsqueeze(0).clone())[0]


def _is_stateful(processor: Any) -> bool:
    kind = type(processor)
    if getattr(processor, "stateless", False):
        return False
    if hasattr(processor, "snapshot") and hasattr(processor, "restore"):
        return True
    if kind.__module__.startswith("transformers.") and kind.__name__ in KNOWN_STATELESS:
        return False
    raise ValueError(
        f"logits processor {kind.__name__} is not known to be stateless: set stateless = True on it if it is, "
        "or give it snapshot() and restore(state)"
    )
