"""A conversation over one cache, turn by turn: what each turn reads, and how long reading and writing take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from experiments.articles.lab import BEYOND_CONTEXT, Lab, LimitError, limits
from experiments.articles.timing import Timing, wait
from experiments.measure import no_garbage_collection
from specdec.runner import ModelRunner

MIB = 2**20


@dataclass(frozen=True)
class Turn:
    """One turn. `read_tokens` were read for it; the cache holds `context_tokens`, in `kv_mib`, at its end.

    `ttfts_ms`: to its first token, once for each time that it was taken. `steps_ms` wrote the answer's tokens behind
    the first, those of all times. `summary`: before it the model summed up what was said.
    """

    read_tokens: int
    context_tokens: int
    ttfts_ms: tuple[float, ...]
    steps_ms: tuple[float, ...]
    kv_mib: float
    answer: tuple[int, ...]
    summary: Turn | None = None

    @staticmethod
    def merged(turns: Sequence[Turn]) -> Turn:
        """The same turn, taken several times, as one."""
        summaries = [turn.summary for turn in turns if turn.summary is not None]
        return replace(
            turns[0],
            ttfts_ms=tuple(ms for turn in turns for ms in turn.ttfts_ms),
            steps_ms=tuple(ms for turn in turns for ms in turn.steps_ms),
            summary=Turn.merged(summaries) if summaries else None,
        )

    @property
    def ttft_ms(self) -> float:
        return median(self.ttfts_ms)

    @property
    def step(self) -> Timing:
        return Timing.of(self.steps_ms)

    @property
    def total_ms(self) -> float:
        """Reading and writing, without the summary."""
        return self.ttft_ms + sum(self.steps_ms) / len(self.ttfts_ms)

    @property
    def waited_ms(self) -> float:
        """From the message to the first token of its answer: a summary before it is waited for too."""
        return self.ttft_ms + (self.summary.total_ms if self.summary else 0.0)


class Dialogue:
    """One row of a cache that texts are read into and answers written from, greedily.

    Args:
        capacity: tokens that the cache holds, or the model's context where that is less. Raises LimitError where the
            machine doesn't hold them.
    """

    def __init__(self, lab: Lab, capacity: int) -> None:
        self._device = lab.device
        self._capacity = min(capacity, lab.context)
        self._runner: ModelRunner = lab.runner(1, self._capacity)

    def turn(self, text: Sequence[int], answer_tokens: int, is_kept: bool) -> Turn:
        """Read `text` behind what the cache holds (`is_kept`) or into an empty one, then write so many tokens.

        Raises LimitError for what the cache can't hold.
        """
        held = self._runner.lengths[0] if is_kept else 0
        if held + len(text) + answer_tokens - 1 > self._capacity:  # the newest token is not in it
            raise LimitError(BEYOND_CONTEXT)
        with limits(), no_garbage_collection(), torch.inference_mode():
            if not is_kept:
                self._runner.release(0)
            start_s = time.perf_counter()
            token = self._read(text)
            ttft_ms = 1e3 * (time.perf_counter() - start_s)
            answer, steps_ms = [token], []
            while len(answer) < answer_tokens:
                start_s = time.perf_counter()
                answer.append(self._read([answer[-1]]))
                steps_ms.append(1e3 * (time.perf_counter() - start_s))
        return Turn(
            read_tokens=len(text),
            context_tokens=self._runner.lengths[0],
            ttfts_ms=(ttft_ms,),
            steps_ms=tuple(steps_ms),
            kv_mib=self._runner.cache.live_bytes / MIB,
            answer=tuple(answer),
        )

    def _read(self, text: Sequence[int]) -> int:
        """Append to the cache; the most probable token behind it."""
        if self._runner.lengths[0]:
            logits = self._runner.decode(torch.tensor([text], device=self._device))
            self._runner.commit([self._runner.lengths[0]])
        else:
            logits = self._runner.prefill([list(text)], [0])
        token = int(logits[0].argmax())
        wait(self._device)
        return token


@dataclass(frozen=True)
class Script:
    """What is said: token ids of the opening, of what stands between an answer and the next one.

    The texts are those of a model's chat template where it has one, else paragraphs.
    """

    tokenizer: Any

    def opening(self, message: str) -> list[int]:
        """The first turn, up to where the model answers."""
        if not self.tokenizer.chat_template:
            return self._encode(message)
        return self._encode(self._rendered([_user(message)]))

    def between(self, message: str) -> list[int]:
        """From behind an answer up to where the model answers the next message."""
        if not self.tokenizer.chat_template:
            return self._encode(f"\n\n{message}")
        marker = "ANSWER"
        before = self._rendered([_user("x")])
        after = self._rendered([_user("x"), {"role": "assistant", "content": marker}, _user(message)])
        # What the template puts behind an answer, and then the message.
        return self._encode(after[len(before) :].partition(marker)[2])

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decoded(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _user(message: str) -> dict[str, str]:
    return {"role": "user", "content": message}
