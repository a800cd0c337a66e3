"""One token per pass: the twin that every other method must equal."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.base import Decoder, DecodingOptions, DecodingParts
from specdec.progress import Progress
from specdec.types import Phase, StepOutput


class AutoregressiveDecoder(Decoder):
    """Each step reads the newest token of every row and writes the next."""

    def step(self, progress: Progress) -> StepOutput:
        rows = progress.rows
        logits = self.runner.decode(self.newest_tokens(rows))
        self.runner.commit([len(row.token_ids) for row in rows])
        return progress.commit(Phase.DECODE, rows, self.next_tokens(logits, rows))


@dataclass
class AutoregressiveOptions(DecodingOptions):
    """Has no options."""

    def build(self, parts: DecodingParts) -> AutoregressiveDecoder:
        return AutoregressiveDecoder(parts)
