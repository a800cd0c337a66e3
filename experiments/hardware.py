"""What this machine can do at most, measured: read bandwidth, matrix-product rate, and the overhead of a pass.

Every number is the best of several tries: a ceiling that something else pulled down would flatter whatever is held
against it. Whoever asks says how results are remembered (`remember`); by default they are measured anew.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.clocks import cache_bytes
from experiments.environment import cpu_name
from experiments.metrics import METRICS_VERSION
from experiments.roofline import GIGA, Ceilings
from specdec.runner import ModelRunner

TRIES = 7
# No more tries after this: a dtype without fast kernels (fp16 on many CPUs) takes seconds for one product.
BUDGET_S = 2.0
# Large beside any last-level cache, small beside any memory.
LEAST_BUFFER_BYTES = 512 * 2**20
CACHES_IN_BUFFER = 16
MATRIX_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
# Widths that every weight format can hold, first the smallest.
TINY_WIDTHS = (64, 128, 256)
TINY_HEAD_DIM = 32
# What families call the width of their feed-forward layers, beside `intermediate_size`.
FEED_FORWARD_WIDTHS = ("n_inner", "ffn_dim")
OVERHEAD_PASSES = 24
OVERHEAD_CONTEXT = 16
READ_GB_S, GEMM_GFLOP_S, OVERHEAD_MS = "read_gb_s", "gemm_gflop_s", "pass_overhead_ms"
Values = dict[str, float]
# Gets what a measurement depends on, and the measurement; gives its values, old or new.
Remember = Callable[[Mapping[str, str], Callable[[], Values]], Values]


def measure_anew(key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
    return measure()


@dataclass
class Hardware:
    """The ceilings for one device, dtype and number of threads."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    remember: Remember = field(default=measure_anew)

    def ceilings(self) -> Ceilings:
        """Read bandwidth and matrix-product rate; about a second."""
        values = self.remember(self._key(), self._measure_rates)
        return Ceilings(values[READ_GB_S], values[GEMM_GFLOP_S], getattr(self.remember, "is_noisy", False))

    def overhead_ms(self, model_config: Any, weights: Any) -> float | None:
        """Time of a decode pass of the same module tree with tiny widths, `weights` being a format's options.

        What is left when there is next to nothing to read or multiply: the interpreter, dispatch, kernel
        launches. None where the format can't hold any of the tiny models.
        """
        key = {
            **self._key(),
            "model_type": str(model_config.model_type),
            "layers": str(model_config.num_hidden_layers),
            "modules": _digest(tiny_config(model_config, TINY_WIDTHS[0])),
            "weights": str(weights),
        }
        values = self.remember(key, lambda: self._measure_overhead(model_config, weights))
        return values.get(OVERHEAD_MS)

    def _key(self) -> dict[str, str]:
        return {
            "device": self.device.type,
            "device_name": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else cpu_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": str(self.threads),
            "torch": torch.__version__,
            "definitions": METRICS_VERSION,
        }

    def _measure_rates(self) -> Values:
        return {READ_GB_S: read_gb_s(self.device), GEMM_GFLOP_S: gemm_gflop_s(self.device, self.dtype)}

    def _measure_overhead(self, model_config: Any, weights: Any) -> Values:
        for width in TINY_WIDTHS:
            model = tiny_copy(model_config, width, self.dtype, self.device)
            try:
                converted = weights.convert(model)
            except ValueError:  # the format needs wider matrices
                continue
            return {OVERHEAD_MS: pass_ms(converted)}
        return {}


def read_gb_s(device: torch.device) -> float:
    """1e9 bytes per second that reductions read of a buffer far beyond the last-level cache, best of all tries."""
    buffer = _buffer(device)
    rows = buffer.view(-1, 2**16)
    reads: tuple[Callable[[], Tensor], ...] = (
        lambda: buffer.sum(),
        lambda: rows.sum(1),
        lambda: rows.amax(1),
    )
    return buffer.nbytes / min(_best_s(read, device) for read in reads) / GIGA


def gemm_gflop_s(device: torch.device, dtype: torch.dtype) -> float:
    """1e9 operations per second of square matrix products, the best of some sizes and of all tries."""
    best = 0.0
    for size in MATRIX_SIZES[device.type]:
        left = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        right = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        product_s = _best_s(partial(torch.nn.functional.linear, left, right), device)
        best = max(best, 2 * size**3 / product_s / GIGA)
    return best


def tiny_config(model_config: Any, width: int) -> Any:
    """The configuration with everything that decides which modules there are, and matrices of `width` or less.

    Several matrices that a family stores as one (query, key and value) are as often that width; tables of positions,
    of which a pass reads rows, keep their length.
    """
    config = copy.deepcopy(model_config)
    heads = width // TINY_HEAD_DIM
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "head_dim": TINY_HEAD_DIM,
        "vocab_size": width,
        "pad_token_id": None,
    }
    if hasattr(config, "num_key_value_heads"):
        grouped = config.num_key_value_heads < config.num_attention_heads
        sizes["num_key_value_heads"] = heads // 2 if grouped else heads
    for name in FEED_FORWARD_WIDTHS:
        if hasattr(config, name):
            sizes[name] = width
    if hasattr(config, "word_embed_proj_dim"):
        # Embeddings of another width than the layers' are projected by modules that must stay.
        is_projected = config.word_embed_proj_dim != config.hidden_size
        sizes["word_embed_proj_dim"] = width // 2 if is_projected else width
    config.update(sizes)
    return config


def tiny_copy(model_config: Any, width: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random model with the modules of `model_config`, layer for layer, and the matrices of `tiny_config`."""
    model: Any = AutoModelForCausalLM.from_config(tiny_config(model_config, width), dtype=dtype)
    return model.to(device).eval()


def pass_ms(model: PreTrainedModel) -> float:
    """Time of a pass over one token of one row behind a short text, the best of `OVERHEAD_PASSES`."""
    runner = ModelRunner(model, 1, OVERHEAD_CONTEXT + 1)
    runner.prefill([[0] * OVERHEAD_CONTEXT], [0])
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    def one_pass() -> None:
        runner.decode(token)
        runner.commit([OVERHEAD_CONTEXT])

    return 1e3 * _best_s(one_pass, model.device, OVERHEAD_PASSES)


def _best_s(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> float:
    times: list[float] = []
    while len(times) <= tries and (len(times) < 2 or sum(times) < BUDGET_S):
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start_s)
    return min(times[1:])  # the first one is slow


def _digest(config: Any) -> str:
    return hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]


def _buffer(device: torch.device) -> Tensor:
    """Zeros in float32; on a CPU in large pages where the system has them, which is how fast weights can be read."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        available = torch.cuda.mem_get_info(device)[0]
    else:
        cache, available = cache_bytes() or 0, psutil.virtual_memory().available
    wanted = max(LEAST_BUFFER_BYTES, CACHES_IN_BUFFER * cache)
    num_bytes = min(wanted, available // 4) // 2**21 * 2**21
    if device.type == "cuda":
        return torch.zeros(num_bytes // 4, device=device)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).zero_()
