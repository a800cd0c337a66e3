"""Run arms over blocks of prompts, interleaved, and record what happened when.

All arms decode the same block before the next block begins, in an order shuffled from the seed, so that a change
of the machine's speed meets all of them alike.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from experiments.timed import Clock, Recorder, time_parts
from experiments.trace import StepEvent, Trace
from specdec.decoding.base import Decoder
from specdec.types import Request

WARMUP_NEW_TOKENS = 12


def measure(
    decoders: Mapping[str, Decoder],
    blocks: Sequence[Sequence[Request]],
    *,
    repeats: int = 1,
    warmup: int = 1,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda arm: None,
    clock: Clock = time.perf_counter,
) -> list[Trace]:
    """One trace per (repeat, block, arm).

    Args:
        decoders: by arm name; timed wrappers are around their parts meanwhile.
        blocks: requests that are decoded together; a block may exceed the slots, the rest waits.
        warmup: blocks decoded before, a few tokens each, unmeasured: first-use costs (repacking, allocation).
        on_progress: called after each block of an arm, outside the timed region.
    """
    recorders = {arm: time_parts(decoder, clock) for arm, decoder in decoders.items()}
    try:
        _warm_up(decoders.values(), blocks, warmup)
        order = random.Random(seed)
        traces = []
        with _old_objects_exempt():
            for repeat in range(repeats):
                for number in order.sample(range(len(blocks)), len(blocks)):
                    for arm in order.sample(sorted(decoders), len(decoders)):
                        trace = Trace(arm, repeat, number)
                        _decode(decoders[arm], blocks[number], recorders[arm], trace)
                        traces.append(trace)
                        on_progress(arm)
        return traces
    finally:
        for recorder in recorders.values():
            recorder.restore()


def _warm_up(decoders: Iterable[Decoder], blocks: Sequence[Sequence[Request]], count: int) -> None:
    for number in range(count):
        block = [_shortened(request) for request in blocks[number % len(blocks)]]
        for decoder in decoders:
            for _ in decoder.generate(block):
                pass


def _decode(decoder: Decoder, block: Sequence[Request], recorder: Recorder, trace: Trace) -> None:
    recorder.trace, clock = trace, recorder.clock
    with no_garbage_collection():
        steps = decoder.generate(block)
        trace.start_s = start_s = clock()
        for output in steps:
            end_s = clock()
            trace.steps.append(StepEvent(start_s, end_s, output))
            start_s = end_s
        trace.end_s = clock()


@contextmanager
def _old_objects_exempt() -> Iterator[None]:
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


def _shortened(request: Request) -> Request:
    return replace(request, max_new_tokens=min(request.max_new_tokens, WARMUP_NEW_TOKENS))
