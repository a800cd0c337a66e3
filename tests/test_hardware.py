"""Ceilings: the best of many tries, tiny copies with the same modules, and what a remembered number depends on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from experiments import hardware
from experiments.hardware import GEMM_GFLOP_S, OVERHEAD_MS, READ_GB_S, Hardware, Values
from quant.weights.base import WeightsOptions
from quant.weights.bnb_nf4 import BnbNf4Weights
from quant.weights.plain import PlainWeights
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread", "small")
CPU = torch.device("cpu")
BUFFER_BYTES = 4 * 2**20
WIDTH = 64
TICK = 1 / 1024


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LEAST_BUFFER_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(hardware, "CACHES_IN_BUFFER", 0)
    monkeypatch.setattr(hardware, "MATRIX_SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(hardware, "OVERHEAD_PASSES", 2)


# --- rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_positive_and_finite(dtype: torch.dtype) -> None:
    found = Hardware(CPU, dtype, 1).ceilings()
    assert 0 < found.read_gb_s < math.inf
    assert 0 < found.gemm_gflop_s < math.inf


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each timed piece of work takes, in order; `TICK` where the list has ended."""
    script: list[float] = []
    readings: Iterator[float] = _readings(script)
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    return script


def _readings(script: list[float]) -> Iterator[float]:
    now, number = 0.0, 0
    while True:
        yield now
        now += script[number] if number < len(script) else TICK
        number += 1
        yield now


def test_the_best_try_counts_and_the_first_is_left_out(durations: list[float]) -> None:
    calls: list[None] = []
    durations += [TICK / 4, 4 * TICK, TICK / 2, 8 * TICK]
    assert hardware._best_s(lambda: calls.append(None), CPU, tries=3) == TICK / 2
    assert len(calls) == 4


def test_slow_work_is_tried_once_after_the_first(durations: list[float]) -> None:
    calls: list[None] = []
    durations += [2 * hardware.BUDGET_S, 4 * hardware.BUDGET_S]
    assert hardware._best_s(lambda: calls.append(None), CPU) == 4 * hardware.BUDGET_S
    assert len(calls) == 2


def test_bandwidth_is_that_of_the_fastest_read_of_any_kind(durations: list[float]) -> None:
    durations += [TICK / 4, *[TICK] * hardware.TRIES]
    durations += [TICK / 4, 2 * TICK, TICK / 2]
    assert hardware.read_gb_s(CPU) == BUFFER_BYTES / (TICK / 2) / 1e9


def test_arithmetic_is_that_of_the_best_size(durations: list[float]) -> None:
    durations += [TICK / 64, *[TICK / 2] * hardware.TRIES]  # 8 x 8: 2 x 512 operations
    durations += [TICK / 64, *[TICK] * hardware.TRIES]  # 16 x 16: 2 x 4096
    assert hardware.gemm_gflop_s(CPU, torch.float32) == 8192 / TICK / 1e9


def test_the_buffer_is_many_times_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CACHES_IN_BUFFER", 16)
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 2**20)
    assert hardware._buffer(CPU).nbytes == 16 * 2**20


def test_the_buffer_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 * 2**20))
    monkeypatch.setattr(hardware, "psutil", memory)
    assert hardware._buffer(CPU).nbytes == 2 * 2**20


# --- the tiny copy


def modules_of(model: PreTrainedModel) -> tuple[list[tuple[str, type]], list[str]]:
    """Every module's name and type, and the names of what they store: biases too."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return modules, [name for name, _ in model.named_parameters()]


def matrices_of(model: PreTrainedModel) -> list[torch.Size]:
    """Of all linear layers: what a pass reads whole."""
    return [module.weight.shape for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]


# Query, key and value; or gate and up, and a query with half as many keys and values.
STORED_AS_ONE = {"phi3": 2, "gpt2": 3, "gpt_neox": 3}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_copy_has_the_same_modules_and_narrow_matrices(family: str, tied: bool) -> None:
    original = tiny_model(
        family,
        hidden_size=128,
        vocab_size=300,
        pad_token_id=299,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
    )
    before = copy.deepcopy(original.config.to_dict())
    found = hardware.tiny_copy(original.config, WIDTH, torch.bfloat16, CPU)
    assert original.config.to_dict() == before
    assert modules_of(found) == modules_of(AutoModelForCausalLM.from_config(original.config))
    assert found.config.num_hidden_layers == 3
    shares = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert shares is tied
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert max(max(shape) for shape in matrices_of(found)) == WIDTH * STORED_AS_ONE.get(family, 1)
    assert max(min(shape) for shape in matrices_of(found)) == WIDTH
    assert found.get_input_embeddings().num_embeddings == WIDTH
    runner = ModelRunner(found, 1, 4)
    assert runner.prefill([[0, 1, 2]], [0]).shape == (1, WIDTH)


@pytest.mark.parametrize(("kv_heads", "is_grouped"), [(4, False), (2, True), (1, True)])
def test_a_tiny_copy_shares_keys_between_heads_where_the_model_does(kv_heads: int, is_grouped: bool) -> None:
    config = tiny_model(num_key_value_heads=kv_heads).config
    found = hardware.tiny_copy(config, WIDTH, torch.float32, CPU).config
    assert (found.num_key_value_heads < found.num_attention_heads) is is_grouped


@pytest.mark.parametrize(("width", "projected"), [(128, False), (16, True)])
def test_a_tiny_copy_projects_its_embeddings_where_the_model_does(width: int, projected: bool) -> None:
    original = tiny_model("opt", hidden_size=128, word_embed_proj_dim=width)
    found = hardware.tiny_copy(original.config, WIDTH, torch.float32, CPU)
    assert modules_of(found) == modules_of(AutoModelForCausalLM.from_config(original.config))
    table: Any = found.get_input_embeddings()
    assert (table.embedding_dim < WIDTH) is projected
    assert any("project_in" in name for name, _ in found.named_modules()) is projected


# --- the overhead of a pass


@pytest.mark.parametrize("weights", [PlainWeights(), BnbNf4Weights()], ids=["plain", "bnb_nf4"])
def test_a_pass_of_a_tiny_copy_takes_some_time(weights: WeightsOptions) -> None:
    found = Hardware(CPU, torch.bfloat16, 1).overhead_ms(tiny_model().config, weights)
    assert found is not None
    assert 0 < found < math.inf


@dataclass
class WideWeights:
    """A format for matrices of `least` columns or more."""

    least: int

    def __post_init__(self) -> None:
        self.tried: list[int] = []

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        self.tried.append(model.config.hidden_size)
        if model.config.hidden_size < self.least:
            raise ValueError(f"needs {self.least}")
        return model


@pytest.mark.parametrize(("least", "tried"), [(64, [64]), (65, [64, 128]), (256, [64, 128, 256])])
def test_a_format_that_needs_wider_matrices_gets_them(least: int, tried: list[int]) -> None:
    weights = WideWeights(least)
    assert Hardware(CPU, torch.float32, 1).overhead_ms(tiny_model().config, weights) is not None
    assert weights.tried == tried


def test_no_tiny_model_no_overhead() -> None:
    weights = WideWeights(257)
    assert Hardware(CPU, torch.float32, 1).overhead_ms(tiny_model().config, weights) is None


def test_overhead_is_the_best_of_the_passes(durations: list[float]) -> None:
    durations += [0.25, 1.0, 0.5]
    found = Hardware(CPU, torch.float32, 1).overhead_ms(tiny_model().config, WideWeights(64))
    assert found == 500.0


# --- what is remembered


class Memory:
    """Notes the keys; gives what it is told, without measuring."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.keys: list[dict[str, str]] = []

    def __call__(self, key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
        self.keys.append(dict(key))
        return self.values


def test_what_is_remembered_is_not_measured() -> None:
    rates = Memory({READ_GB_S: 3.0, GEMM_GFLOP_S: 5.0})
    found = Hardware(CPU, torch.float32, 1, rates).ceilings()
    assert (found.read_gb_s, found.gemm_gflop_s) == (3.0, 5.0)
    config, weights = tiny_model().config, WideWeights(64)
    assert Hardware(CPU, torch.float32, 1, Memory({OVERHEAD_MS: 7.0})).overhead_ms(config, weights) == 7.0
    assert Hardware(CPU, torch.float32, 1, Memory({})).overhead_ms(config, weights) is None
    assert weights.tried == []


def test_what_is_measured_is_given_to_remember() -> None:
    seen: list[Values] = []

    def remember(key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
        seen.append(measure())
        return seen[-1]

    machine = Hardware(CPU, torch.float32, 1, remember)
    machine.ceilings()
    machine.overhead_ms(tiny_model().config, WideWeights(64))
    machine.overhead_ms(tiny_model().config, WideWeights(1000))
    assert [set(values) for values in seen] == [{READ_GB_S, GEMM_GFLOP_S}, {OVERHEAD_MS}, set()]


def test_rates_are_remembered_by_dtype_threads_device_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory({READ_GB_S: 3.0, GEMM_GFLOP_S: 5.0})
    for dtype, threads in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2)):
        Hardware(CPU, dtype, threads, memory).ceilings()
    for name in ("GPU A", "GPU B"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        Hardware(torch.device("cuda"), torch.float32, 1, memory).ceilings()
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    Hardware(CPU, torch.float32, 1, memory).ceilings()
    assert len({tuple(sorted(key.items())) for key in memory.keys}) == len(memory.keys) == 6
    Hardware(CPU, torch.float32, 1, memory).ceilings()
    assert memory.keys[-1] == memory.keys[-2]


def test_overheads_are_remembered_by_family_layers_and_format_too() -> None:
    memory = Memory({OVERHEAD_MS: 7.0})
    machine = Hardware(CPU, torch.float32, 1, memory)
    plain, nf4 = PlainWeights(), BnbNf4Weights()
    for model, weights in (
        (tiny_model("llama"), plain),
        (tiny_model("qwen3"), plain),
        (tiny_model("llama", num_hidden_layers=3), plain),
        (tiny_model("llama"), nf4),
    ):
        machine.overhead_ms(model.config, weights)
    assert len({tuple(sorted(key.items())) for key in memory.keys}) == len(memory.keys) == 4
