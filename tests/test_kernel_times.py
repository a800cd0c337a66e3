"""Kernel times on a machine whose kernels take times written by hand: there the sum of parts is the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_clock import Clock
from toy_models import FAMILIES, VOCAB_SIZE, random_prompts, tiny_model
from toy_weights import FORMATS
from transformers import PreTrainedModel

from experiments import kernel_times as module
from experiments.kernel_times import ATTENTION, HEADING, KernelTime, KernelTimes, kernel_times, rows_of
from quant.footprint import linear_layers
from quant.kv.kv_int4 import KVInt4
from quant.kv.kv_int8 import KVInt8
from specdec.kv_stores.dense import DenseOptions
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread", "small")
CONTEXT = 5
# Binary fractions of a second: sums of them are exact.
TICK_S = 1 / 1024
EMBED_S = 1 / 64
ATTEND_S = 1 / 256
LAYERS = 2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache_bytes", lambda: 2**12)
    monkeypatch.setattr(module, "ROUNDS", 3)


class SlowMachine:
    """A runner whose linear layers, attention and embedding move a clock by known times, and nothing else does.

    A linear layer takes a tick per 32 outputs and position.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int = 2, options: Any = None) -> None:
        self.clock = Clock()
        self.model = model
        self.runner = ModelRunner(model, num_slots, 24, make_store=(options or DenseOptions()).build)
        for layer in linear_layers(model):
            self.slow(layer, "forward", lambda output: TICK_S * output.numel() / 32)
        self.slow(model.get_input_embeddings(), "forward", lambda output: EMBED_S)
        self.slow(self.runner.cache.store, "attend", lambda output: ATTEND_S * output.shape[0])

    def slow(self, owner: Any, name: str, takes_s: Callable[[Tensor], float]) -> None:
        work = getattr(owner, name)

        def slowed(*arguments: Any) -> Tensor:
            output: Tensor = work(*arguments)
            assert not output.requires_grad  # keeping what a gradient needs would take time
            self.clock.now += takes_s(output)
            return output

        setattr(owner, name, slowed)

    def times(self, rows: int, tokens: int, **options: Any) -> KernelTimes:
        return kernel_times(self.runner, rows, tokens, CONTEXT, clock=self.clock, **options)

    def pass_ms(self, rows: int, tokens: int, last_only: bool) -> float:
        """Of the pass itself, behind what the slots hold."""
        token_ids = torch.zeros(rows, tokens, dtype=torch.long)
        lengths = self.runner.lengths[:rows]
        start_s = self.clock()
        if last_only:
            self.runner.decode(token_ids)
        else:
            self.runner.verify(token_ids, [tokens] * rows)
        self.runner.commit(lengths)
        return 1e3 * (self.clock() - start_s)


# --- the sum of the parts is the pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "tokens", "last_only"), [(1, 1, False), (2, 3, False), (2, 3, True)])
def test_the_parts_are_the_pass(family: str, rows: int, tokens: int, last_only: bool) -> None:
    machine = SlowMachine(tiny_model(family))
    times = machine.times(rows, tokens, last_only=last_only)
    assert times.total_ms == pytest.approx(machine.pass_ms(rows, tokens, last_only))
    assert times.overhead_ms == 1e3 * EMBED_S
    assert times.attention_ms == pytest.approx(1e3 * LAYERS * rows * ATTEND_S)
    assert times.total_ms == times.linear_ms + times.attention_ms + times.overhead_ms
    assert times.kernels_ms == times.linear_ms + times.attention_ms


@pytest.mark.parametrize("label", ["int8", "int8_onednn", "int4", "bnb_nf4", "quanto_int8"])
def test_of_any_weight_format(label: str) -> None:
    known = FORMATS[label]
    float_model = tiny_model(hidden_size=64, intermediate_size=128, vocab_size=64, dtype=torch.bfloat16)
    machine = SlowMachine(known.weights.convert(float_model))
    times = machine.times(1, 2)
    assert times.total_ms == pytest.approx(machine.pass_ms(1, 2, last_only=False))
    assert sum(kind.count for kind in times.linears) == 7 * LAYERS + 1
    assert {kind.name.partition(" 64 x ")[0] for kind in times.linears if " 64 x " in kind.name} == {
        known.kernel
    }


@pytest.mark.parametrize("options", [KVInt8(), KVInt4()])
def test_of_any_store(options: Any) -> None:
    machine = SlowMachine(tiny_model(dtype=torch.float32), options=options)
    times = machine.times(2, 3)
    assert times.total_ms == pytest.approx(machine.pass_ms(2, 3, last_only=False))
    assert times.attention.read_bytes * LAYERS == machine.runner.cache.store.live_bytes([CONTEXT + 3] * 2)


# --- kinds


def test_every_linear_layer_is_counted_once_by_kind() -> None:
    times = SlowMachine(tiny_model()).times(2, 3)
    found = {kind.name: (kind.count, kind.positions) for kind in times.linears}
    assert found == {
        "Linear 32 x 32": (2 * LAYERS, 6),  # queries, outputs
        "Linear 16 x 32": (2 * LAYERS, 6),  # keys, values
        "Linear 48 x 32": (2 * LAYERS, 6),
        "Linear 32 x 48": (LAYERS, 6),
        f"Linear {VOCAB_SIZE} x 32 (head)": (1, 6),
    }
    assert (times.attention.name, times.attention.count, times.attention.positions) == (ATTENTION, LAYERS, 6)


def test_the_head_counts_for_the_positions_it_runs_on() -> None:
    machine = SlowMachine(tiny_model())
    (head,) = [kind for kind in machine.times(2, 3, last_only=True).linears if "(head)" in kind.name]
    assert head.positions == 2
    assert head.ms == 1e3 * 2 * TICK_S * VOCAB_SIZE / 32


def test_a_fused_projection_and_a_transposed_weight_are_linear_layers() -> None:
    kinds = {kind.name for kind in SlowMachine(tiny_model("gpt2")).times(1, 1).linears}
    assert kinds == {
        "Conv1D 96 x 32",
        "Conv1D 32 x 32",
        "Conv1D 128 x 32",
        "Conv1D 32 x 128",
        f"Linear {VOCAB_SIZE} x 32 (head)",
    }


def test_a_layer_that_two_places_share_counts_twice() -> None:
    model: Any = tiny_model()
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    machine = SlowMachine(model)
    times = machine.times(1, 1)
    assert {kind.count for kind in times.linears if kind.name == "Linear 48 x 32"} == {2 * LAYERS}
    assert times.total_ms == pytest.approx(machine.pass_ms(1, 1, last_only=False))


def test_bytes_and_rates_by_hand() -> None:
    machine = SlowMachine(tiny_model(tie_word_embeddings=True, dtype=torch.float32))
    times = machine.times(2, 1)
    read = {kind.name: kind.read_bytes for kind in times.linears}
    assert read["Linear 48 x 32"] == 4 * 48 * 32
    assert read[f"Linear {VOCAB_SIZE} x 32 (head)"] == 4 * VOCAB_SIZE * 32
    assert (
        times.attention.read_bytes == 2 * (CONTEXT + 1) * 2 * 2 * 8 * 4
    )  # rows, tokens, K and V, heads, width
    kind = KernelTime("some", 1, 3, 0.5, 2e6)
    assert (kind.ms, kind.gb_s) == (1.5, 4.0)
    assert KernelTime("some", 1, 3, 0.0, 2e6).gb_s is None


# --- how it is measured


def test_one_slow_round_is_not_what_a_kind_takes() -> None:
    model: Any = tiny_model()
    machine = SlowMachine(model)
    expected = machine.times(1, 1)
    calls: list[int] = []

    def slow_in_one_round(output: Tensor) -> float:
        calls.append(len(output))
        return 9.0 * (len(calls) == 4)  # two passes are noted before the first round

    machine.slow(model.model.layers[0].mlp.up_proj, "forward", slow_in_one_round)
    assert machine.times(1, 1) == expected
    assert len(calls) == 2 + module.ROUNDS


def test_where_rounds_are_long_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_passes(budget_s: float) -> int:
        monkeypatch.setattr(module, "BUDGET_S", budget_s)
        machine = SlowMachine(tiny_model())
        passes: list[int] = []

        def embedded(output: Tensor) -> float:
            passes.append(len(output))
            return 0.0

        machine.slow(machine.model.get_input_embeddings(), "forward", embedded)
        machine.times(1, 1)
        return len(passes)

    assert num_passes(1e9) - num_passes(0.0) == module.ROUNDS - 1


def test_the_caches_are_emptied_before_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    whole_sum = Tensor.sum

    def noting_sum(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        reads.append(self.nbytes)
        return whole_sum(self, *arguments, **options)

    monkeypatch.setattr(Tensor, "sum", noting_sum)
    times = SlowMachine(tiny_model()).times(1, 1)
    assert reads.count(module.CACHES_IN_BUFFER * 2**12) == module.ROUNDS * (len(times.linears) + 2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_the_first_call_brings_back_is_not_a_kernels_time(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emptied caches lack code as well: here the first linear layer or attention behind it takes 4 seconds more."""
    machine = SlowMachine(tiny_model(family))
    expected = machine.times(1, 1)
    is_cold = False
    whole_sum = Tensor.sum

    def emptying_sum(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        nonlocal is_cold
        is_cold = True
        return whole_sum(self, *arguments, **options)

    def more_s(output: Tensor) -> float:
        nonlocal is_cold
        was_cold, is_cold = is_cold, False
        return 4.0 * was_cold

    monkeypatch.setattr(Tensor, "sum", emptying_sum)
    for layer in linear_layers(machine.model):
        machine.slow(layer, "forward", more_s)
    machine.slow(machine.runner.cache.store, "attend", more_s)
    assert machine.times(1, 1) == expected


def test_the_model_and_the_texts_are_as_before() -> None:
    model = tiny_model()
    runner = ModelRunner(model, 3, 24)
    (prompt,) = random_prompts([CONTEXT])
    runner.prefill([prompt, prompt], [0, 2])
    token_ids = torch.tensor([[1, 2]])
    before = runner.verify(token_ids, [2])
    runner.commit([CONTEXT])
    kernel_times(runner, 2, 2, CONTEXT)
    assert runner.lengths == (CONTEXT,) * 3
    assert torch.equal(runner.verify(token_ids, [2]), before)
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert not {"attend", "write"} & set(vars(runner.cache.store))


def test_a_failing_pass_leaves_the_model_whole() -> None:
    machine = SlowMachine(tiny_model())
    own = vars(machine.model.get_output_embeddings())["forward"]

    def fail(_: Tensor) -> float:
        raise RuntimeError("out of memory")

    machine.slow(machine.runner.cache.store, "attend", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.times(1, 1)
    assert vars(machine.model.get_output_embeddings())["forward"] is own


@pytest.mark.parametrize(
    ("rows", "tokens", "context", "message"),
    [
        (0, 1, 5, "rows=0: expected 1 to 2"),
        (3, 1, 5, "rows=3: expected 1 to 2"),
        (1, 0, 5, "tokens=0: expected 1 to 24"),
        (1, 4, 21, "context=21: expected 0 to 20"),
        (1, 4, -1, "context=-1: expected 0 to 20"),
        (2, 1, 5, "context=5: slot 1 holds 7 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(rows: int, tokens: int, context: int, message: str) -> None:
    runner = ModelRunner(tiny_model(), 2, 24)
    runner.prefill(random_prompts([7]), [1])
    with pytest.raises(ValueError, match=message):
        kernel_times(runner, rows, tokens, context)
    assert runner.lengths == (0, 7)


def test_a_prompt_is_a_pass_behind_nothing() -> None:
    machine = SlowMachine(tiny_model())
    times = kernel_times(machine.runner, 1, 7, 0, last_only=True, clock=machine.clock)
    assert machine.runner.lengths == (0, 0)
    assert times.total_ms == pytest.approx(machine.pass_ms(1, 7, last_only=True))


# --- the table


def test_the_table_has_a_line_for_each_kind_and_the_whole() -> None:
    times = KernelTimes(
        (KernelTime("Linear 8 x 4", 3, 2, 0.25, 5e5), KernelTime("Linear 9 x 4 (head)", 1, 1, 0.0, 1e6)),
        KernelTime(ATTENTION, 3, 2, 0.125, 2.5e4),
        1.5,
    )
    assert rows_of(times) == [
        HEADING,
        ["Linear 8 x 4", "3", "2", "0.2500", "0.50", "2.0"],
        ["Linear 9 x 4 (head)", "1", "1", "0.0000", "0.00", "-"],
        [ATTENTION, "3", "2", "0.1250", "0.25", "0.2"],
        ["overhead", "", "", "", "1.50", ""],
        ["in all", "", "", "", "2.25", ""],
    ]
