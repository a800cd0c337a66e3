"""A runner and a drafter that note when each call began and ended; same protocols, nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.recorder import Clock, Recorder
from specdec.decoding.base import Decoder
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws
from specdec.progress import Row, Vacancy
from specdec.runner import Runner
from specdec.types import DraftProposal, GoOn, Prospect, Verification

TARGET_PHASES = {"prefill": "prefill", "decode": "decode", "verify": "verify"}
DRAFT_PHASES = {"prefill": "draft_prefill", "decode": "draft", "verify": "draft"}


def _synchronize(device: torch.device) -> None:
    # Passes are queued on a GPU: without waiting, the clock would time the queueing.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedRunner:
    """Records one PassEvent per pass, and one per row of a prefill."""

    def __init__(self, runner: Runner, recorder: Recorder, phases: dict[str, str]) -> None:
        self._runner = runner
        self._recorder = recorder
        self._phases = phases

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def prefill_chunk(self) -> int | None:
        return self._runner.prefill_chunk

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._runner.lengths

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        logits = [
            self._timed(
                "prefill",
                [len(prompt)],
                len(prompt),
                slice(slot, slot + 1),
                self._runner.prefill,
                [prompt],
                [slot],
            )
            for prompt, slot in zip(prompts, slots, strict=True)
        ]
        return torch.cat(logits)

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        rows, width = token_ids.shape
        real = [width] * rows if counts is None else counts
        return self._timed("decode", real, width, slice(rows), self._runner.decode, token_ids, counts)

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        rows, width = token_ids.shape
        return self._timed("verify", counts, width, slice(rows), self._runner.verify, token_ids, counts)

    def commit(self, lengths: Sequence[int]) -> None:
        self._runner.commit(lengths)

    def move(self, source: int, destination: int) -> None:
        self._runner.move(source, destination)

    def release(self, slot: int) -> None:
        self._runner.release(slot)

    def _timed(
        self,
        call: str,
        counts: Sequence[int],
        width: int,
        slots: slice,
        run: Callable[..., Tensor],
        *arguments: object,
    ) -> Tensor:
        recorder = self._recorder
        start_s = recorder.clock()
        logits = run(*arguments)
        _synchronize(self._runner.device)
        end_s = recorder.clock()
        chunk = self._runner.prefill_chunk if call == "prefill" else None
        num_passes = -(-width // chunk) if chunk else 1
        recorder.add_pass(
            self._phases[call], start_s, end_s, counts, width, slots, self._runner.lengths, num_passes
        )
        return logits


class TimedDrafter(Drafter):
    """Records one ProposalEvent per proposal."""

    def __init__(self, drafter: Drafter, recorder: Recorder) -> None:
        self._drafter = drafter
        self._recorder = recorder

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        start_s = self._recorder.clock()
        proposal = self._drafter.propose(rows, limits, go_on, draws)
        _synchronize(proposal.token_ids.device)
        self._recorder.add_proposal(start_s, self._recorder.clock())
        return proposal

    def prospects(self, rows: Sequence[Row]) -> Sequence[Prospect]:
        return self._drafter.prospects(rows)

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self._drafter.accept(rows, verification)

    def vacate(self, vacancy: Vacancy) -> None:
        self._drafter.vacate(vacancy)


def time_parts(decoder: Decoder, clock: Clock) -> Recorder:
    """Put timed wrappers around a decoder's runner, its drafter, and the drafter's own runner if it has one.

    The recorder's `restore` takes them away again.
    """
    recorder = Recorder(clock)
    recorder.replace(decoder, "runner", TimedRunner(decoder.runner, recorder, TARGET_PHASES))
    drafter = getattr(decoder, "drafter", None)
    if drafter is not None:
        if hasattr(drafter, "runner"):
            recorder.replace(drafter, "runner", TimedRunner(drafter.runner, recorder, DRAFT_PHASES))
        recorder.replace(decoder, "drafter", TimedDrafter(drafter, recorder))
    return recorder
