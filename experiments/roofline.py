"""What a pass must cost at least, and how far from that it is: pure functions of pass events.

Definitions (a contract, see README): the bytes a pass moves are the weights it reads plus the keys and values it
reads and writes; its arithmetic is two operations per weight and token, the head counted for the positions it ran
on, plus attention. MBU and MFU are those, over the pass's time, as shares of what this machine was measured to do
(Agarwal et al., "LLM Inference Performance Engineering", 2023; Chowdhery et al. 2022, appendix B). The roofline is
that of Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.trace import PassEvent

GIGA = 1e9


@dataclass(frozen=True)
class Ceilings:
    """What this machine was measured to do, with a run's device, threads and dtype."""

    read_gb_s: float  # 1e9 bytes per second, arrays far beyond the last-level cache
    gemm_gflop_s: float  # 1e9 operations per second, large matrix products
    is_noisy: bool = False  # measured beside a busy process: the machine can do more


@dataclass(frozen=True)
class ModelCost:
    """What passes of one model, stored in one format, have to move and compute.

    `weights_read_bytes` are read by a pass over one token; `embedding_row_bytes` by each further one (0 where the
    table is the head, which is read whole). `attention_width` is layers x query heads x head dimension.
    `kv_bytes_per_token` are those of one more token of a long text, `kv_row_bytes[n]` those that a row of n tokens
    holds where that is not simply n times as much.
    """

    weights_read_bytes: int
    embedding_row_bytes: int
    kv_bytes_per_token: float
    body_parameters: int
    head_parameters: int
    attention_width: int
    kv_row_bytes: tuple[int, ...] = ()

    def weight_bytes(self, event: PassEvent) -> int:
        more_tokens = max(0, sum(event.counts) - event.num_passes)
        return event.num_passes * self.weights_read_bytes + more_tokens * self.embedding_row_bytes

    def kv_bytes(self, event: PassEvent) -> float:
        """Read and written. Of a prompt in chunks, each of which reads all before it: as if they were equally long.

        What a store packs later is counted as written once, when the token comes.
        """
        read = self.held_kv_bytes(event.kv_lengths) * (event.num_passes + 1) / 2
        return read + self.held_kv_bytes([1]) * sum(event.counts)

    def held_kv_bytes(self, lengths: Iterable[int]) -> float:
        """Bytes of the cache that rows of so many tokens hold."""
        if not self.kv_row_bytes:
            return self.kv_bytes_per_token * sum(lengths)
        return sum(self.kv_row_bytes[length] for length in lengths)

    def bytes_moved(self, event: PassEvent) -> float:
        return self.weight_bytes(event) + self.kv_bytes(event)

    def operations(self, event: PassEvent) -> float:
        """Multiplications and additions: 2 per weight and token, 4 per attended position and width (QK and AV)."""
        attended = sum(
            count * length - count * (count - 1) / 2
            for count, length in zip(event.counts, event.kv_lengths, strict=True)
        )
        products = self.body_parameters * sum(event.counts) + self.head_parameters * _head_positions(event)
        return 2 * products + 4 * self.attention_width * attended


@dataclass(frozen=True)
class RooflinePoint:
    """All passes of one kind: arithmetic intensity and achieved rate, as ratios of sums."""

    label: str
    num_passes: int
    operations_per_byte: float
    gflop_s: float
    gb_s: float


@dataclass(frozen=True)
class PassParts:
    """Where the time of a mean pass goes, milliseconds. `rest_ms` is what the other three leave.

    Where overhead and reading overlap (a GPU's queue), `rest_ms` is negative: the parts are measured apart.
    """

    pass_ms: float
    floor_ms: float
    kv_ms: float
    overhead_ms: float

    @property
    def rest_ms(self) -> float:
        return self.pass_ms - self.floor_ms - self.kv_ms - self.overhead_ms


def mbu_frac(events: Sequence[PassEvent], cost: ModelCost, ceilings: Ceilings) -> float | None:
    """Bytes moved / time / measured bandwidth, as ratios of sums; None for no passes."""
    time_s = sum(event.duration_s for event in events)
    if not time_s:
        return None
    return sum(map(cost.bytes_moved, events)) / time_s / (GIGA * ceilings.read_gb_s)


def mfu_frac(events: Sequence[PassEvent], cost: ModelCost, ceilings: Ceilings) -> float | None:
    """Operations / time / measured rate, as ratios of sums; None for no passes."""
    time_s = sum(event.duration_s for event in events)
    if not time_s:
        return None
    return sum(map(cost.operations, events)) / time_s / (GIGA * ceilings.gemm_gflop_s)


def floor_ms(cost: ModelCost, ceilings: Ceilings) -> float:
    """The time of reading the weights once: no pass over one token can be shorter."""
    return 1e3 * cost.weights_read_bytes / (GIGA * ceilings.read_gb_s)


def pass_parts(
    events: Sequence[PassEvent], cost: ModelCost, ceilings: Ceilings, overhead_ms: float
) -> PassParts | None:
    """A mean pass divided; None for no passes. `overhead_ms` is that of a pass of the same modules, tiny."""
    num_passes = sum(event.num_passes for event in events)
    if not num_passes:
        return None

    def read_ms(num_bytes: float) -> float:
        return 1e3 * num_bytes / (GIGA * ceilings.read_gb_s) / num_passes

    return PassParts(
        pass_ms=1e3 * sum(event.duration_s for event in events) / num_passes,
        floor_ms=read_ms(sum(map(cost.weight_bytes, events))),
        kv_ms=read_ms(sum(map(cost.kv_bytes, events))),
        overhead_ms=overhead_ms,
    )


def point(label: str, events: Iterable[PassEvent], cost: ModelCost) -> RooflinePoint | None:
    """The passes of one kind on the roofline; None for no passes, or for passes that took no time."""
    events = list(events)
    time_s = sum(event.duration_s for event in events)
    if not time_s:
        return None
    moved, operations = sum(map(cost.bytes_moved, events)), sum(map(cost.operations, events))
    return RooflinePoint(
        label,
        sum(event.num_passes for event in events),
        operations / moved,
        operations / time_s / GIGA,
        moved / time_s / GIGA,
    )


def _head_positions(event: PassEvent) -> int:
    """Positions whose logits were computed: the last one of a prompt's chunk or of a plain pass, else all."""
    rows = len(event.counts)
    if event.phase in ("prefill", "draft_prefill"):
        return rows * event.num_passes
    only_last = event.phase != "verify" and all(count == event.width for count in event.counts)
    return rows if only_last else rows * event.width
