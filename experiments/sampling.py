"""From the configuration of sampling to the engine's values: words become token ids, and stops become a rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from experiments.config import SamplingConfig, check
from specdec.progress import StopTokens
from specdec.types import SamplingParams, StopRule

# Looked at before a stop string's own tokens, so that its edges decode as they do within the whole text.
TOKENS_AROUND = 8


@dataclass(frozen=True)
class StopStrings:
    """The answer ends with the token that completes one of these strings, wherever its tokens begin and end."""

    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def first_end(self, token_ids: Sequence[int], start: int) -> int | None:
        return next(
            (end for end in range(start + 1, len(token_ids) + 1) if self._ends_at(token_ids, end)), None
        )

    def _ends_at(self, token_ids: Sequence[int], end: int) -> bool:
        # A token is at least a byte, so a string has no more tokens than bytes.
        longest = max(len(string.encode()) for string in self.strings)
        window = token_ids[max(0, end - longest - TOKENS_AROUND) : end]
        text = self.tokenizer.decode(list(window), skip_special_tokens=False)
        return any(string in text for string in self.strings)


@dataclass(frozen=True)
class FirstOf:
    """Whichever of several rules ends the answer first."""

    rules: tuple[StopRule, ...]

    def first_end(self, token_ids: Sequence[int], start: int) -> int | None:
        ends = [rule.first_end(token_ids, start) for rule in self.rules]
        return min((end for end in ends if end is not None), default=None)


def stop_ids(config: SamplingConfig, end_of_text: Collection[int]) -> frozenset[int]:
    """The tokens that end an answer: the model's own unless they are ignored, and the configured ones."""
    own = frozenset() if config.ignore_eos else frozenset(end_of_text)
    return own | frozenset(config.stop_token_ids)


def stop_rule(
    config: SamplingConfig, end_of_text: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> StopRule:
    tokens = StopTokens(stop_ids(config, end_of_text))
    if not config.stop:
        return tokens
    return FirstOf((tokens, StopStrings(tuple(config.stop), tokenizer)))


def check_token_ids(config: SamplingConfig, vocab_size: int) -> None:
    """Raises ValueError for a token id that the model does not have."""
    given = {
        "logit_bias": [token_id for token_id, _ in config.logit_bias],
        "stop_token_ids": config.stop_token_ids,
    }
    for name, token_ids in given.items():
        for token_id in token_ids:
            check(
                0 <= token_id < vocab_size,
                f"sampling.{name}",
                f"[..{int(token_id)}..]",
                f"token ids below {vocab_size}, the size of the vocabulary",
            )


def sampling_params(config: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Raises ValueError for a value out of range, by the name it has on a command line."""
    words = dict.fromkeys(ids for word in config.bad_words for ids in _spellings(word, tokenizer))
    try:
        return SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            typical_p=config.typical_p,
            repetition_penalty=config.repetition_penalty,
            frequency_penalty=config.frequency_penalty,
            presence_penalty=config.presence_penalty,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in config.logit_bias),
            bad_words=tuple(words),
            min_new_tokens=config.min_new_tokens,
        )
    except ValueError as error:  # the engine knows no group that its parameters are in
        raise ValueError(f"sampling.{error}") from error


def _spellings(word: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Within a text a word mostly comes with the space before it."""
    texts = (word, f" {word}")
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
