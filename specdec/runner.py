"""Three verbs over one model and one cache: prefill, decode, verify.

The active rows of a pass are slots 0..B-1. A pass appends its tokens to the cache; `commit` then says how much of
that stays, which is also how rejected draft tokens are rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf_adapter import HFAdapter
from specdec.kv_cache import CacheShape, KVCache, KVStore
from specdec.kv_stores.dense import DenseStore


class Runner(Protocol):
    """What decoders and drafters need of a model; a measuring wrapper has the same protocol."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int:
        """V: token ids are below it, and logits are so wide."""
        ...

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens per prefill pass; None where a prompt is read in one."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in the cache, per slot."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor: ...

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor: ...

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor: ...

    def commit(self, lengths: Sequence[int]) -> None: ...

    def move(self, source: int, destination: int) -> None: ...

    def release(self, slot: int) -> None: ...


class ModelRunner:
    """Runs one unmodified Hugging Face decoder with a cache of `num_slots` rows of `capacity` tokens.

    Args:
        prefill_chunk: tokens per prefill pass; None reads each prompt in one pass.
        pass_tokens: every decode and verify pass has all slots as rows and so many tokens per row, padded, over the
            whole buffer: passes of one shape round alike, so that what a token's logits are does not depend on how
            many others its pass had. None: passes are as large as needed.
        vocab_size: logits are cut to the first so many tokens; None: the model's own.
        longest_pass: the most tokens per row of a verify pass, for stores that depend on it; default: `pass_tokens`,
            where that is given.
        make_store: builds the KV store for a given shape; the dense store by default.
        cache: a cache to use instead, of at least as many slots, layers and that capacity, such as a view of another
            runner's.

    Raises:
        ValueError: an unknown model family, a capacity or vocabulary beyond the model's, or a cache of another shape.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        capacity: int,
        *,
        prefill_chunk: int | None = None,
        pass_tokens: int | None = None,
        vocab_size: int | None = None,
        longest_pass: int | None = None,
        make_store: Callable[[CacheShape], KVStore] = DenseStore,
        cache: KVCache | None = None,
    ) -> None:
        if num_slots < 1 or capacity < 1:
            raise ValueError(f"num_slots={num_slots}, capacity={capacity}: both must be at least 1")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: expected at least 1, or none")
        if pass_tokens is not None and pass_tokens < 1:
            raise ValueError(f"pass_tokens={pass_tokens}: expected at least 1, or none")
        self._adapter = HFAdapter(model, vocab_size)
        self._num_slots = num_slots
        self._pass_tokens = pass_tokens
        self.prefill_chunk: int | None = prefill_chunk
        shape = self._adapter.cache_shape(num_slots, capacity, pass_tokens or longest_pass)
        if cache is not None and not cache.store.shape.holds(shape):
            raise ValueError(f"the model needs a cache of {shape}, the one given is of {cache.store.shape}")
        self.cache = KVCache(make_store(shape)) if cache is None else cache

    @property
    def model(self) -> PreTrainedModel:
        return self._adapter.model

    @property
    def vocab_size(self) -> int:
        return self._adapter.vocab_size

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.cache.lengths)

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Read each prompt into its (empty) slot: logits `[B, V]` at the prompts' last positions.

        One row at a time, so that prompts of unequal length need no padding. Where a single short prompt leaves the
        arithmetic idle (a large GPU), a joint pass would be faster; there is none yet.
        """
        return torch.cat(
            [self._prefill_row(prompt, slot) for prompt, slot in zip(prompts, slots, strict=True)]
        )

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Append `token_ids [B, T]`, row b's first `counts[b]` (default: all T): logits `[B, V]` at the last.

        T is 1 but where a row catches up. A row with count 0 gets arbitrary logits.
        """
        rows, width = token_ids.shape
        counts = [width] * rows if counts is None else counts
        if self._pass_tokens is not None:
            return _last(self._fixed_pass(token_ids, counts), counts)
        last_only = all(count == width for count in counts) or width == 1
        logits = self._pass(token_ids, 0, counts, last_only)
        if last_only:
            return logits[:, -1]
        return _last(logits, counts)

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Append row b's first `counts[b]` of `token_ids [B, T]`: logits `[B, T, V]`, arbitrary behind a count."""
        if self._pass_tokens is not None:
            return self._fixed_pass(token_ids, counts)
        return self._pass(token_ids, 0, counts, last_only=False)

    def extend(self, tokens: Sequence[int], slot: int) -> Tensor:
        """Read the next tokens of a prompt, in one pass, for good: logits `[1, V]` at the last of them.

        What `prefill` does chunk by chunk; between two of them other slots may decode, which then need not wait for a
        long prompt (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024).
        """
        return self._extend(torch.tensor([tokens], device=self.device), slot)

    def commit(self, lengths: Sequence[int]) -> None:
        """Slots 0, 1, ... keep their first `lengths[slot]` tokens, for good; the rest is rolled back."""
        self.cache.roll_back(lengths)
        self.cache.commit()

    def move(self, source: int, destination: int) -> None:
        """The row in slot `source` goes on in slot `destination`."""
        self.cache.move(source, destination)

    def release(self, slot: int) -> None:
        """The slot is empty."""
        self.cache.release(slot)

    def _prefill_row(self, prompt: Sequence[int], slot: int) -> Tensor:
        if self.cache.lengths[slot]:
            raise ValueError(
                f"slot {slot} holds {self.cache.lengths[slot]} tokens: a prompt needs an empty one"
            )
        tokens = torch.tensor([prompt], device=self.device)
        for chunk in tokens.split(self.prefill_chunk or len(prompt), dim=1):
            logits = self._extend(chunk, slot)
        return logits

    def _extend(self, chunk: Tensor, slot: int) -> Tensor:
        logits = self._pass(chunk, slot, [chunk.shape[1]], last_only=True)
        self.cache.commit_slot(slot)  # nobody rejects a prompt
        return logits[:, -1]

    def _pass(self, token_ids: Tensor, first_slot: int, counts: Sequence[int], last_only: bool) -> Tensor:
        layout = self.cache.layout(first_slot, counts, token_ids.shape[1])
        logits = self._adapter.forward(token_ids, layout, self.cache.store, last_only)
        self.cache.advance(layout)
        return logits

    def _fixed_pass(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits `[B, T, V]` from a pass that always has the same shape."""
        rows, width = token_ids.shape
        assert self._pass_tokens is not None
        if width > self._pass_tokens:
            raise ValueError(f"a pass of {width} tokens per row, but pass_tokens={self._pass_tokens}")
        padded = token_ids.new_zeros(self._num_slots, self._pass_tokens)
        padded[:rows, :width] = token_ids
        all_counts = [*counts, *([0] * (self._num_slots - rows))]
        layout = self.cache.layout(0, all_counts, self._pass_tokens, is_fixed=True)
        logits = self._adapter.forward(padded, layout, self.cache.store, last_only=False)
        self.cache.advance(layout)
        return logits[:rows, :width]


def _last(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Logits `[B, V]` at each row's last real position of `[B, T, V]`."""
    last = torch.tensor(counts, device=logits.device).sub_(1).clamp_min_(0)
    return logits[torch.arange(len(counts), device=logits.device), last]
