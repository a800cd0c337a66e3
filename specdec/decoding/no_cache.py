"""Decoding as if there were no KV cache: each step reads the whole text again, n^2 / 2 tokens in all."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.base import Decoder, DecodingOptions, DecodingParts
from specdec.progress import Progress
from specdec.types import Phase, StepOutput


class NoCacheDecoder(Decoder):
    """Each step is a prefill of every row's whole text. Shows what the cache saves; no one should serve so."""

    def step(self, progress: Progress) -> StepOutput:
        rows = progress.rows
        for row in rows:
            self.runner.release(row.slot)
        logits = self.runner.prefill([row.token_ids for row in rows], [row.slot for row in rows])
        return progress.commit(Phase.DECODE, rows, self.next_tokens(logits, rows))


@dataclass
class NoCacheOptions(DecodingOptions):
    """Has no options."""

    def build(self, parts: DecodingParts) -> NoCacheDecoder:
        return NoCacheDecoder(parts)
