"""The laboratory of an experiment: one model on one machine, and what is measured with it.

A pass that can't be had, for memory or for the model's context, raises `LimitError`: experiments note it and go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from experiments import plugins
from experiments._processes import is_out_of_memory
from experiments.articles.timing import Timing, repeated, wait
from experiments.hardware import Hardware
from experiments.kernel_times import KernelTimes, kernel_times
from experiments.model_cost import model_cost
from experiments.point import PreparedPoint, prepare
from experiments.roofline import GIGA, Ceilings, ModelCost
from experiments.strategy import Arm, build_decoder
from experiments.trace import PassEvent
from specdec.decoding.base import Decoder
from specdec.hf_adapter import HFAdapter
from specdec.progress import StopTokens
from specdec.runner import ModelRunner
from specdec.types import Request

OUT_OF_MEMORY, BEYOND_CONTEXT = "out of memory", "beyond context"
# Of the memory that is free; the rest is for activations.
USABLE_FRAC = 0.6
PREFILL_CHUNK = 512
# The decoding whose step is one pass over one token of each row, behind a cache.
CACHED = "autoregressive"


class LimitError(Exception):
    """Something can't be measured here; the text says why: `OUT_OF_MEMORY` or `BEYOND_CONTEXT`."""


@dataclass(frozen=True)
class Floors:
    """The least a pass can take, milliseconds: by what the machine can do, and by what its kernels take alone."""

    memory_ms: float
    compute_ms: float
    overhead_ms: float | None
    kernels_ms: float | None = None

    @property
    def hardware_ms(self) -> float:
        """The larger of moving the bytes and doing the arithmetic at the measured ceilings."""
        return max(self.memory_ms, self.compute_ms)

    @property
    def with_overhead_ms(self) -> float | None:
        """That and the overhead of a pass, where it is known."""
        return None if self.overhead_ms is None else self.hardware_ms + self.overhead_ms


class Lab:
    """What an experiment measures with. Nothing is loaded before it is asked for."""

    def __init__(self, point: PreparedPoint, hardware: Hardware) -> None:
        self.point = point
        self.hardware = hardware
        self.arm: Arm = point.arms.strategy
        self.device = point.pool.device

    @property
    def model(self) -> PreTrainedModel:
        """The target, loaded when it is first asked for. Raises LimitError."""
        with limits():
            return self.point.pool.target(self.arm.weights)

    @property
    def has_plain_steps(self) -> bool:
        """Is a decode step one pass over one token of each row, behind a cache? Else theory speaks of another step."""
        return bool(self.arm.decoding.name == CACHED)

    @property
    def context(self) -> int:
        """The most tokens that the model's positions allow."""
        return int(self.point.pool.target_config.max_position_embeddings)

    def varied(self, **parts: str) -> Lab:
        """The same laboratory with other parts by name, as in `kv="kv_int8"` or `weights="int4"`."""
        options = {group: plugins.default_options(group, name) for group, name in parts.items()}
        lab = Lab(self.point, self.hardware)
        lab.arm = replace(self.arm, **options)
        return lab

    def stores(self, names: Sequence[str]) -> dict[str, Lab]:
        """This laboratory, and one for each other KV store among `names`; by the store's name, this one first."""
        own = self.arm.kv.name
        return {own: self, **{name: self.varied(kv=name) for name in names if name != own}}

    def in_dtype(self, name: str) -> Lab:
        """The same laboratory in another dtype (its name), with models of its own. Raises what `prepare` does."""
        point = prepare(replace(self.point.config, dtype=name))
        lab = Lab(point, replace(self.hardware, dtype=point.pool.dtype))
        lab.arm = self.arm
        return lab

    # --- what passes need

    def runner(self, rows: int, capacity: int, prefill_chunk: int | None = None) -> ModelRunner:
        """The target with a cache of its own. Raises LimitError."""
        self.check_fits(rows, capacity)
        with limits():
            return ModelRunner(
                self.model, rows, capacity, prefill_chunk=prefill_chunk, make_store=self.arm.kv.build
            )

    def kv_bytes(self, rows: int, capacity: int) -> int:
        """What a cache of that size allocates; nothing is."""
        shape = HFAdapter(self.model).cache_shape(rows, min(capacity, self.context))
        return int(self.arm.kv.build(replace(shape, device=torch.device("meta"))).allocated_bytes())

    def decoder(self, rows: int, capacity: int, *, stops: bool = False) -> Decoder:
        """The strategy's decoder with caches of its own. Raises LimitError.

        `stops`: texts end as the sampling says, by default at their length only.
        """
        self.check_fits(rows, capacity)
        settings = replace(self.point.settings, num_slots=rows, capacity=capacity)
        if not stops:
            settings = replace(settings, stop_ids=frozenset(), stop_rule=StopTokens())
        with limits():
            return build_decoder(self.arm, self.point.pool, settings)

    def random_ids(self, count: int, seed: int = 0) -> list[int]:
        """Token ids for passes whose time does not depend on what they say."""
        draw = random.Random(1000 * self.point.config.seed + seed)
        return [draw.randrange(self.point.vocab_size) for _ in range(count)]

    def real_requests(self, rows: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
        """Texts of the workload, cut or repeated to `prompt_tokens`: all of one length, so that rows step together."""
        prompts = [request.prompt_ids for request in self.point.requests]
        found = []
        for row in range(rows):
            text = list(prompts[row % len(prompts)])
            while len(text) < prompt_tokens:
                text += prompts[(row + len(text)) % len(prompts)]
            found.append(Request(row, tuple(text[-prompt_tokens:]), new_tokens))
        return found

    # --- passes, timed

    def prefill(self, num_tokens: int, prefill_chunk: int | None = None, **times: Any) -> Timing:
        """Reading a prompt of random tokens. Raises LimitError."""
        runner = self.runner(1, num_tokens, prefill_chunk)
        prompt = self.random_ids(num_tokens)
        with limits():
            return repeated(
                lambda: runner.prefill([prompt], [0]), self.device, lambda: runner.release(0), **times
            )

    def one_pass(self, rows: int, tokens: int, context: int, **times: Any) -> Timing:
        """Over `tokens` of each row behind `context` random ones: decode for 1, else verify. Raises LimitError."""
        runner = self.filled(rows, context, tokens)
        return self.pass_on(runner, tokens, **times)

    def pass_on(self, runner: ModelRunner, tokens: int, **times: Any) -> Timing:
        """The same over a cache that is filled already, and is left as it was."""
        lengths = runner.lengths
        ids = torch.tensor(
            [self.random_ids(tokens, row + 1) for row in range(len(lengths))], device=self.device
        )

        def work() -> None:
            if tokens == 1:
                runner.decode(ids)
            else:
                runner.verify(ids, [tokens] * len(lengths))

        with limits():
            return repeated(work, self.device, lambda: runner.commit(lengths), **times)

    def filled(self, rows: int, context: int, more: int) -> ModelRunner:
        """A runner whose rows hold `context` random tokens, with room for `more`. Raises LimitError."""
        runner = self.runner(rows, context + more, prefill_chunk=PREFILL_CHUNK)
        with limits(), torch.inference_mode():
            for row in range(rows):
                runner.prefill([self.random_ids(context, row)], [row])
            wait(self.device)
        return runner

    def read_on(self, runner: ModelRunner, context: int) -> None:
        """Rows of equal length read random tokens until each holds `context`. Raises LimitError."""
        rows = len(runner.lengths)
        with limits(), torch.inference_mode():
            while (held := runner.lengths[0]) < context:
                count = min(PREFILL_CHUNK, context - held)
                ids = [self.random_ids(count, held + row) for row in range(rows)]
                runner.decode(torch.tensor(ids, device=self.device))
                runner.commit([held + count] * rows)
            wait(self.device)

    # --- theory

    @cached_property
    def ceilings(self) -> Ceilings:
        return self.hardware.ceilings()

    @cached_property
    def overhead_ms(self) -> float | None:
        """Of a pass, with tiny matrices; None where the weight format can't hold a tiny model."""
        return self.hardware.overhead_ms(self.model.config, self.arm.weights)

    @cached_property
    def cost(self) -> ModelCost:
        """What passes move and compute, at any context of this model."""
        return model_cost(self.runner(1, 1))

    def floors(self, rows: int, tokens: int, context: int, kernels: bool = False) -> Floors:
        """Of a pass over `tokens` of each row behind `context` of them; `kernels`: each timed alone, about a second."""
        event = self.event(rows, tokens, context)
        cost = self.cost_at(context + tokens)
        return Floors(
            memory_ms=1e3 * cost.bytes_moved(event) / (GIGA * self.ceilings.read_gb_s),
            compute_ms=1e3 * cost.operations(event) / (GIGA * self.ceilings.gemm_gflop_s),
            overhead_ms=self.overhead_ms,
            kernels_ms=self.kernel_times(rows, tokens, context).total_ms if kernels else None,
        )

    def cost_at(self, capacity: int) -> ModelCost:
        """The same for rows of up to `capacity` tokens."""
        shape = HFAdapter(self.model).cache_shape(1, min(capacity, self.context))
        store = self.arm.kv.build(replace(shape, device=torch.device("meta")))
        return replace(
            self.cost, kv_row_bytes=tuple(round(store.live_bytes([length])) for length in range(capacity + 1))
        )

    def event(self, rows: int, tokens: int, context: int, start_s: float = 0, end_s: float = 0) -> PassEvent:
        """Such a pass as an event, for functions of events."""
        length = context + tokens
        # The head runs on the last position of a prompt, and on all of a verify pass.
        phase = "prefill" if not context else "decode" if tokens == 1 else "verify"
        return PassEvent(phase, start_s, end_s, (tokens,) * rows, tokens, (length,) * rows, rows * length)

    def kernel_times(self, rows: int, tokens: int, context: int) -> KernelTimes:
        """Linear layers and attention of such a pass, alone on cold weights, and its overhead. Raises LimitError."""
        runner = self.runner(rows, context + tokens, prefill_chunk=PREFILL_CHUNK)
        with limits(), torch.inference_mode():
            return kernel_times(runner, rows, tokens, context, last_only=not context)

    def check_fits(self, rows: int, capacity: int) -> None:
        """Can a cache of that size be had? Raises LimitError.

        Linux gives memory that it doesn't have, and ends the process that uses it: ask before. So does who wants one
        cache for a whole curve: the largest that can be had.
        """
        if capacity > self.context:
            raise LimitError(BEYOND_CONTEXT)
        if self.kv_bytes(rows, capacity) > self.free_bytes:
            raise LimitError(OUT_OF_MEMORY)

    @property
    def free_bytes(self) -> int:
        """What caches may take now."""
        if self.device.type == "cuda":
            # What PyTorch keeps of freed tensors is free for new ones.
            kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + kept
        return int(USABLE_FRAC * psutil.virtual_memory().available)


@contextmanager
def limits() -> Iterator[None]:
    """What runs out of memory in here raises LimitError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise LimitError(OUT_OF_MEMORY) from error
        raise


Found = TypeVar("Found")


def along(
    steps: Sequence[int], what: str, measure: Callable[[int], Found]
) -> tuple[dict[int, Found], dict[str, str]]:
    """Measure at each step, in order. What can't be had is the second result, as in {"batch 128": "out of memory"}.

    Raises LimitError where nothing at all can be had.
    """
    found: dict[int, Found] = {}
    missing: dict[str, str] = {}
    for step in sorted(set(steps)):
        try:
            found[step] = measure(step)
        except LimitError as limit:
            missing[f"{what} {step}"] = str(limit)
    if not found:
        raise LimitError("; ".join(f"{where}: {why}" for where, why in missing.items()))
    return found, missing
