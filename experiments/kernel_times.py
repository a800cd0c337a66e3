"""The kernel-limited prediction of a pass: what its kernels take, each timed alone on cold weights, summed.

The hardware's floor says what no kernel can beat; this says what the kernels at hand make of it, and which of them
take the time. Nothing is fitted. A pass is run once to note what it calls; then, in turn and several times,

1. each kind of linear layer: all layers of the model that are of that kind, one after another;
2. attention: all layers through the KV store, over the texts that it holds;
3. the overhead: the pass as it is, with every linear layer and every attention replaced by a result that lies ready.
   What is left is norms, rotations, residuals, activations, writing to the cache, and the interpreter.

Before each of them the caches are emptied by reading a buffer that is larger: a pass finds its weights in memory,
since the rest of the model went through the caches since it read them last. Once for all layers of a kind, and with a
call of something else behind it: emptied caches lack the interpreter and the kernel's code as well, which a pass has at
hand from one layer to the next (bringing them back takes longer than most products of a small model). What a pass
multiplies was written a moment ago, and so it is here.

The three parts overlap nowhere and leave nothing out: a layer's `forward` alone is in 1, the call of it in 3.
`Hardware.overhead_ms` would not do for 3, since its tiny linear layers and attention take time too, and its norms are
narrow. What the sum can't know is how the parts disturb each other's caches: a pass tends to take a little more.

On a GPU the overhead is that of the host, which runs ahead of the kernels where they are long: there the total is
too much, and a pass takes between `kernels_ms` and `total_ms`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, median

import torch

from experiments.clocks import cache_bytes
from experiments.pass_notes import hollow, note_pass
from experiments.roofline import GIGA
from specdec.runner import ModelRunner

ROUNDS = 7
# No further round after this: where a pass takes seconds, so does a round.
BUDGET_S = 20.0
CACHES_IN_BUFFER = 4
UNKNOWN_CACHE_BYTES = 64 * 2**20
HEADING = ["kernel", "positions", "number", "ms each", "ms in all", "GB/s"]
ATTENTION = "attention"
Clock = Callable[[], float]


@dataclass(frozen=True)
class KernelTime:
    """One kind of kernel: `count` calls in a pass, each over `positions` tokens and reading `read_bytes`."""

    name: str
    positions: int
    count: int
    ms_each: float
    read_bytes: float

    @property
    def ms(self) -> float:
        return self.count * self.ms_each

    @property
    def gb_s(self) -> float | None:
        """Weights, or keys and values, by time; None where no time was measured."""
        return self.read_bytes / (1e-3 * self.ms_each) / GIGA if self.ms_each else None


@dataclass(frozen=True)
class KernelTimes:
    """The parts of a pass, timed apart: its linear layers by kind, its attention, and what is left without both."""

    linears: tuple[KernelTime, ...]
    attention: KernelTime
    overhead_ms: float

    @property
    def linear_ms(self) -> float:
        return sum(kind.ms for kind in self.linears)

    @property
    def attention_ms(self) -> float:
        return self.attention.ms

    @property
    def kernels_ms(self) -> float:
        return self.linear_ms + self.attention_ms

    @property
    def total_ms(self) -> float:
        """What a pass should take."""
        return self.kernels_ms + self.overhead_ms


@torch.no_grad()
def kernel_times(
    runner: ModelRunner,
    rows: int,
    tokens: int,
    context: int,
    *,
    last_only: bool = False,
    clock: Clock = time.perf_counter,
) -> KernelTimes:
    """The parts of a pass over `tokens` tokens in each of `rows` rows that hold `context` tokens.

    Of the runner's slots the first `rows` are filled with random tokens where they are empty, and hold `context`
    tokens afterwards; its model is as before.

    Args:
        last_only: logits are wanted at the rows' last positions only, as where a prompt is read.
        clock: seconds; not used for what a GPU does, which has its own.

    Raises ValueError for sizes below 1 (a context: 0) or beyond the runner's, and for a slot that holds another number
    of tokens.
    """
    _fill(runner, rows, tokens, context)
    token_ids = torch.tensor(_random_texts(runner.vocab_size, rows, tokens), device=runner.device)

    def one_pass() -> None:
        if last_only:
            runner.decode(token_ids)
        else:
            runner.verify(token_ids, [tokens] * rows)
        runner.commit([context] * rows)

    notes = note_pass(runner, one_pass)
    timer = _Timer(runner.device, clock)
    linear_ms: list[list[float]] = [[] for _ in notes.products]
    attention_ms: list[float] = []
    overhead_ms: list[float] = []
    began_s = clock()
    while len(overhead_ms) < ROUNDS and (not overhead_ms or clock() - began_s < BUDGET_S):
        for product, found in zip(notes.products, linear_ms, strict=True):
            found.append(mean(timer.each_ms(product.calls(), notes.other_than(product))))
        attention_ms.append(sum(timer.each_ms(notes.attention_calls(runner), notes.last_attention(runner))))
        with hollow(runner, notes):
            overhead_ms += timer.each_ms([one_pass])
    linears = [
        KernelTime(product.name, product.positions, len(product.layers), median(found), product.read_bytes)
        for product, found in zip(notes.products, linear_ms, strict=True)
    ]
    store, num_attends = runner.cache.store, len(notes.attends)
    attention = KernelTime(
        ATTENTION,
        notes.attended_positions,
        num_attends,
        median(attention_ms) / num_attends,
        store.live_bytes([context + tokens] * rows) / store.shape.num_layers,
    )
    return KernelTimes(tuple(linears), attention, median(overhead_ms))


def rows_of(times: KernelTimes) -> list[list[str]]:
    """A table, heading first: every kind of kernel, the overhead, and the whole."""
    lines = [
        [
            kind.name,
            str(kind.positions),
            str(kind.count),
            f"{kind.ms_each:.4f}",
            f"{kind.ms:.2f}",
            "-" if kind.gb_s is None else f"{kind.gb_s:.1f}",
        ]
        for kind in (*times.linears, times.attention)
    ]
    return [
        HEADING,
        *lines,
        ["overhead", "", "", "", f"{times.overhead_ms:.2f}", ""],
        ["in all", "", "", "", f"{times.total_ms:.2f}", ""],
    ]


class _Timer:
    """Times calls one by one, behind a read of so much else that no cache holds what they need."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._buffer = torch.zeros(CACHES_IN_BUFFER * _cache_bytes(device) // 4, device=device)

    def each_ms(
        self, calls: Iterable[Callable[[], object]], first: Callable[[], object] | None = None
    ) -> list[float]:
        """Behind a call of `first`, which is not timed. Nor is what comes between two calls: making the next."""
        self._buffer.sum()
        if first is not None:
            first()
        return self._on_gpu_ms(calls) if self._device.type == "cuda" else self._on_cpu_ms(calls)

    def _on_cpu_ms(self, calls: Iterable[Callable[[], object]]) -> list[float]:
        found = []
        for call in calls:
            start_s = self._clock()
            call()
            found.append(1e3 * (self._clock() - start_s))
        return found

    def _on_gpu_ms(self, calls: Iterable[Callable[[], object]]) -> list[float]:
        pairs = []
        for call in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in pairs]


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return cache_bytes() or UNKNOWN_CACHE_BYTES


def _fill(runner: ModelRunner, rows: int, tokens: int, context: int) -> None:
    shape = runner.cache.store.shape
    for name, value, least, most in (
        ("rows", rows, 1, shape.num_slots),
        ("tokens", tokens, 1, shape.capacity),
        ("context", context, 0, shape.capacity - tokens),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name}={value}: expected {least} to {most}, as the runner's cache allows")
    for slot, length in enumerate(runner.lengths[:rows]):
        if length not in (0, context):
            raise ValueError(f"context={context}: slot {slot} holds {length} tokens; release it first")
    empty = [slot for slot in range(rows) if runner.lengths[slot] < context]
    if empty:
        runner.prefill(_random_texts(runner.vocab_size, len(empty), context), empty)


def _random_texts(vocab_size: int, number: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (number, length), generator=generator).tolist()
