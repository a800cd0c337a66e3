"""Run arms over blocks of prompts, interleaved, and record what happened when.

All arms decode the same block before the next block begins, in an order shuffled from the seed (a randomized
complete block design), so that a change of the machine's speed meets all of them alike.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from experiments.recorder import Clock, Recorder
from experiments.timed import time_parts
from experiments.trace import Trace
from specdec.decoding.base import Decoder
from specdec.types import Request

WARMUP_NEW_TOKENS = 12
# Warm-up ends when the median step of two rounds in a row is the same within this share, or after so many rounds.
STABLE_FRAC = 0.05
MAX_WARMUP_ROUNDS = 8
# Kernels prepare themselves at the first prompt of each length; of more blocks only the longest are tried before.
MAX_BLOCKS_TRIED = 16


def measure(
    decoders: Mapping[str, Decoder],
    blocks: Sequence[Sequence[Request]],
    *,
    repeats: int = 1,
    warmup: int = 1,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda arm: None,
    on_unsettled: Callable[[str], None] = lambda arm: None,
    on_failure: Callable[[str, Exception], None] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Trace]:
    """One trace per (repeat, block, arm).

    Args:
        decoders: by arm name; timed wrappers are around their parts meanwhile.
        blocks: requests that are decoded together; a block may exceed the slots, the rest waits.
        warmup: least rounds of unmeasured decoding before; more follow until step times are stable. 0 is none.
        on_progress: called after each block of an arm, outside the timed region.
        on_unsettled: called with an arm whose step times were still moving at the end of the warm-up.
        on_failure: called with an arm that raised; it takes no further part, the others go on. Without it the
            exception is raised.
    """
    recorders = {arm: time_parts(decoder, clock) for arm, decoder in decoders.items()}
    running = dict(decoders)

    def tried(arm: str, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(arm, *arguments)
        except Exception as error:
            if on_failure is None:
                raise
            del running[arm]
            on_failure(arm, error)

    def settle(arm: str) -> None:
        if not warm_up(running[arm], blocks, warmup, clock):
            on_unsettled(arm)

    def measure_block(arm: str, repeat: int, number: int) -> None:
        traces.append(_decode(running[arm], blocks[number], recorders[arm], arm, repeat, number))
        on_progress(arm)

    order = random.Random(seed)
    traces: list[Trace] = []
    try:
        if warmup:
            for arm in list(running):
                tried(arm, settle)
        with old_objects_exempt():
            for repeat in range(repeats):
                for number in order.sample(range(len(blocks)), len(blocks)):
                    for arm in order.sample(sorted(running), len(running)):
                        tried(arm, measure_block, repeat, number)
        return traces
    finally:
        for recorder in recorders.values():
            recorder.restore()


def warm_up(decoder: Decoder, blocks: Sequence[Sequence[Request]], least_rounds: int, clock: Clock) -> bool:
    """First every shape of prompt once, then one block again and again until its steps take the same time.

    False where they were still moving at the end.
    """
    longest_first = sorted(blocks, key=lambda block: -max(request.max_length for request in block))
    for block in longest_first[:MAX_BLOCKS_TRIED]:
        for _ in decoder.generate(_stand_ins(block, 2)):
            pass
    stand_ins = _stand_ins(blocks[0], WARMUP_NEW_TOKENS)
    steps_s: list[float] = []
    while len(steps_s) < max(least_rounds, MAX_WARMUP_ROUNDS):
        steps_s.append(_median_step_s(decoder, stand_ins, clock))
        if len(steps_s) >= least_rounds and _is_stable(steps_s):
            return True
    return False


def _is_stable(steps_s: Sequence[float]) -> bool:
    return len(steps_s) > 1 and abs(steps_s[-1] - steps_s[-2]) <= STABLE_FRAC * steps_s[-2]


def _stand_ins(block: Sequence[Request], max_new_tokens: int) -> list[Request]:
    """Requests of the same shape, their prompts read backwards: no text is seen before it is measured."""
    return [
        replace(
            request,
            prompt_ids=request.prompt_ids[::-1],
            max_new_tokens=min(request.max_new_tokens, max_new_tokens),
        )
        for request in block
    ]


def _median_step_s(decoder: Decoder, block: Sequence[Request], clock: Clock) -> float:
    """Of the steps behind the first, which is a prefill."""
    times = []
    for _ in decoder.generate(block):
        times.append(clock())
    gaps_s = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps_s) if gaps_s else 0.0


def _decode(
    decoder: Decoder, block: Sequence[Request], recorder: Recorder, arm: str, repeat: int, number: int
) -> Trace:
    recorder.clear()
    with no_garbage_collection():
        began_s, ended_s = record_steps(decoder, block, recorder)
    return recorder.trace(arm, repeat, number, began_s, ended_s)


def record_steps(decoder: Decoder, block: Sequence[Request], recorder: Recorder) -> tuple[float, float]:
    """Every step, timed from outside: when the first was asked for, and when there were no more."""
    clock = recorder.clock
    steps = decoder.generate(block)
    began_s = start_s = clock()
    for output in steps:
        end_s = clock()
        recorder.add_step(start_s, end_s, output)
        start_s = end_s
    return began_s, clock()


@contextmanager
def old_objects_exempt() -> Iterator[None]:
    """The libraries' million objects are looked at once, not before each block: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For timed regions."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
