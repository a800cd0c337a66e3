"""Measurement on a simulated clock: every event is known exactly."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor
from toy_clock import DECODE_S, OVERHEAD_S, PREFILL_S_PER_TOKEN, Clock, SimulatedRunner, spans
from toy_engine import build_decoder, chain, requests_for

from experiments import metrics
from experiments.measure import MAX_WARMUP_ROUNDS, WARMUP_NEW_TOKENS, measure
from experiments.trace import Trace, timelines
from specdec.decoding.base import Decoder
from specdec.progress import Progress
from specdec.types import Request, StepOutput

COUNTING = chain([[0, 1, 0], [0, 0, 1], [1, 0, 0]])  # 0 -> 1 -> 2 -> 0
PROMPTS = [[0] * 4, [1] * 8, [2] * 16, [0] * 32]


class Simulation:
    """Two or more plain arms over one clock; `runners` by arm."""

    def __init__(self, *arms: str, num_slots: int = 1) -> None:
        self.clock = Clock()
        self.runners = {arm: SimulatedRunner(COUNTING, 3, num_slots, self.clock) for arm in arms}
        self.decoders: dict[str, Decoder] = {
            arm: build_decoder(runner, num_slots=num_slots) for arm, runner in self.runners.items()
        }

    def measure(
        self, blocks: Sequence[Sequence[Request]], *, repeats: int = 1, warmup: int = 0, seed: int = 0
    ) -> list[Trace]:
        return measure(self.decoders, blocks, repeats=repeats, warmup=warmup, seed=seed, clock=self.clock)


def blocks_of(size: int, new_tokens: int = 3) -> list[list[Request]]:
    requests = requests_for(PROMPTS, new_tokens)
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def order_of(traces: Sequence[Trace]) -> list[tuple[int, int, str]]:
    return [(trace.repeat, trace.block, trace.arm) for trace in traces]


def test_every_event_is_exact() -> None:
    (trace,) = Simulation("plain").measure([requests_for([[0] * 4], 3)])
    read = 4 * PREFILL_S_PER_TOKEN
    step = DECODE_S + OVERHEAD_S
    assert (trace.start_s, trace.end_s) == (0.0, read + 2 * step)
    assert spans(trace.steps) == [(0.0, read), (read, read + step), (read + step, read + 2 * step)]
    assert spans(trace.passes) == [
        (0.0, read),
        (read, read + DECODE_S),
        (read + step, read + step + DECODE_S),
    ]
    (found,) = timelines(trace)
    assert found.token_ids == (1, 2, 0)
    assert found.commit_times_s == (read, read + step, read + 2 * step)


def test_no_time_falls_between_steps() -> None:
    """Also where looking at the clock takes a while: what a request waits for is all in its gaps."""
    simulation = Simulation("plain")

    def slow_clock() -> float:
        simulation.clock.now += 1 / 1024
        return simulation.clock.now

    (trace,) = measure(simulation.decoders, [requests_for([[0] * 4], 5)], warmup=0, seed=0, clock=slow_clock)
    assert trace.steps[0].start_s == trace.start_s
    assert [step.start_s for step in trace.steps[1:]] == [step.end_s for step in trace.steps[:-1]]
    (found,) = timelines(trace)
    request = metrics.request_metrics(found)
    assert request.ttft_ms + sum(request.itl_ms) == request.total_ms
    assert request.total_ms == 1000 * (trace.steps[-1].end_s - trace.start_s)


def test_rows_of_a_block_share_its_steps() -> None:
    (trace,) = Simulation("plain", num_slots=2).measure([requests_for(PROMPTS[:2], [2, 3])])
    read = 12 * PREFILL_S_PER_TOKEN
    step = DECODE_S + OVERHEAD_S
    first, second = timelines(trace)
    assert first.commit_times_s == (read, read + step)
    assert second.commit_times_s == (read, read + step, read + 2 * step)


def test_a_block_may_exceed_the_slots() -> None:
    (trace,) = Simulation("plain").measure([requests_for(PROMPTS[:2], 2)])
    first, second = timelines(trace)
    assert first.queued_s == 0.0
    assert second.queued_s == first.commit_times_s[-1] == 4 * PREFILL_S_PER_TOKEN + DECODE_S + OVERHEAD_S


def test_all_arms_decode_a_block_before_the_next_one_begins() -> None:
    traces = Simulation("a", "b", "c").measure(blocks_of(1), repeats=2)
    assert len(traces) == 2 * 4 * 3
    for start in range(0, len(traces), 3):
        together = order_of(traces[start : start + 3])
        assert len({(repeat, block) for repeat, block, _ in together}) == 1
        assert sorted(arm for _, _, arm in together) == ["a", "b", "c"]
    assert [trace.repeat for trace in traces] == [0] * 12 + [1] * 12


def test_the_order_is_shuffled_and_the_seeds() -> None:
    def order(seed: int) -> list[tuple[int, int, str]]:
        return order_of(Simulation("a", "b", "c").measure(blocks_of(1, 1), repeats=4, seed=seed))

    first = order(1)
    assert order(1) == first
    assert order(2) != first
    # The seeds are fixed, so that this can't be a false alarm.
    assert {arm for _, _, arm in first[::3]} == {"a", "b", "c"}
    assert len({tuple(block for _, block, _ in first[12 * r : 12 * r + 12 : 3]) for r in range(4)}) > 1


def test_the_order_does_not_depend_on_how_arms_are_listed() -> None:
    one = order_of(Simulation("a", "b").measure(blocks_of(1), seed=4))
    other = order_of(Simulation("b", "a").measure(blocks_of(1), seed=4))
    assert one == other


def test_warm_up_is_unmeasured_and_short() -> None:
    simulation = Simulation("a", "b")
    traces = simulation.measure([requests_for([[0] * 4], 40)], warmup=2)
    assert [trace.arm for trace in sorted(traces, key=lambda trace: trace.arm)] == ["a", "b"]
    for runner in simulation.runners.values():
        passes = Counter(verb for verb, _ in runner.passes)
        # The prompt's shape once with two tokens, two rounds that take the same time, the measured block.
        assert passes == {"prefill": 4, "decode": 1 + 2 * (WARMUP_NEW_TOKENS - 1) + 39}
    assert all(sum(trace.passes[0].counts) == 4 for trace in traces)
    assert {len(trace.passes) for trace in traces} == {40}
    assert min(trace.start_s for trace in traces) > 0


def test_no_warm_up_on_request() -> None:
    simulation = Simulation("a")
    simulation.measure([requests_for([[0] * 4], 3)], warmup=0)
    assert Counter(verb for verb, _ in simulation.runners["a"].passes) == {"prefill": 1, "decode": 2}


def test_warm_up_reads_every_shape_of_prompt_once_longest_first() -> None:
    simulation = Simulation("a")
    simulation.measure(blocks_of(2), warmup=1)
    prompts = [len(read[0]) for verb, read in simulation.runners["a"].passes if verb == "prefill"]
    assert prompts[:4] == [16, 32, 4, 8]
    assert prompts[4:8] == [4, 8, 4, 8]  # two rounds of the first block: they take the same time


def test_warm_up_reads_none_of_the_measured_prompts() -> None:  # M8
    simulation = Simulation("a")
    prompt = [0, 1, 2, 2]
    simulation.measure([requests_for([prompt], 3)], warmup=2)
    read = [tokens[0] for verb, tokens in simulation.runners["a"].passes if verb == "prefill"]
    assert read.count(tuple(prompt)) == 1
    assert read[-1] == tuple(prompt)
    assert {len(tokens) for tokens in read} == {4}


class _Slowing(SimulatedRunner):
    """Each decode pass takes `factor` times what the one before took, from the first on."""

    factor = 1.0

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        self.scale *= self.factor
        return super().decode(token_ids, counts)


@pytest.mark.parametrize(("factor", "unsettled"), [(1.0, []), (1.001, []), (1.05, ["a"]), (0.95, ["a"])])
def test_warm_up_ends_when_step_times_are_stable_or_says_that_they_are_not(
    factor: float, unsettled: list[str]
) -> None:
    clock = Clock()
    runner = _Slowing(COUNTING, 3, 1, clock)
    runner.factor = factor
    told: list[str] = []
    decoder = build_decoder(runner, num_slots=1)
    measure({"a": decoder}, [requests_for([[0] * 4], 12)], warmup=2, clock=clock, on_unsettled=told.append)
    assert told == unsettled
    rounds = Counter(verb for verb, _ in runner.passes)["prefill"] - 2  # the shape once, the measured block
    assert rounds == (MAX_WARMUP_ROUNDS if unsettled else 2)


def test_an_arm_that_fails_takes_no_further_part_and_the_others_go_on() -> None:
    simulation = Simulation("a", "b")
    simulation.decoders["b"] = _Failing(simulation.decoders["b"])
    failed: dict[str, Exception] = {}
    traces = measure(
        simulation.decoders,
        blocks_of(1),
        repeats=2,
        warmup=0,
        clock=simulation.clock,
        on_failure=failed.__setitem__,
    )
    assert [trace.arm for trace in traces] == ["a"] * 8
    assert [(arm, str(error)) for arm, error in failed.items()] == [("b", "injected")]


def test_an_arm_that_fails_in_the_warm_up_is_not_measured() -> None:
    simulation = Simulation("a", "b")
    simulation.decoders["a"] = _Failing(simulation.decoders["a"])
    failed: list[str] = []
    traces = measure(
        simulation.decoders,
        blocks_of(1),
        warmup=2,
        clock=simulation.clock,
        on_failure=lambda arm, error: failed.append(arm),
    )
    assert {trace.arm for trace in traces} == {"b"}
    assert failed == ["a"]


def test_a_measured_prompt_is_read_in_full_whatever_was_read_before() -> None:  # M8
    """The same prompt in the warm-up, twice in the workload, in two repeats: nothing is reused."""
    requests = requests_for([[0] * 8, [0] * 8], 2)
    traces = Simulation("a").measure([requests[:1], requests[1:]], repeats=2, warmup=2)
    assert len(traces) == 4
    for trace in traces:
        assert [sum(event.counts) for event in trace.passes if event.phase == "prefill"] == [8]
        assert timelines(trace)[0].token_ids == (1, 2)
        assert metrics.latency([trace])["latency/ttft_ms.p50"] == 1000 * 8 * PREFILL_S_PER_TOKEN


def test_progress_is_told_outside_the_timed_region() -> None:
    simulation = Simulation("a", "b")
    told: list[str] = []

    def on_progress(arm: str) -> None:
        told.append(arm)
        simulation.clock.now += 64.0  # a slow terminal

    traces = measure(simulation.decoders, blocks_of(1), on_progress=on_progress, clock=simulation.clock)
    assert told == [trace.arm for trace in traces]
    by_block = {trace.block: trace.end_s - trace.start_s for trace in traces}
    assert by_block == {
        number: len(prompt) * PREFILL_S_PER_TOKEN + 2 * (DECODE_S + OVERHEAD_S)
        for number, prompt in enumerate(PROMPTS)
    }


# --- the garbage collector


class _Watching(SimulatedRunner):
    """Notes during each pass whether the collector is on."""

    enabled: set[bool] = set()

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        self.enabled.add(gc.isenabled())
        return super().decode(token_ids, counts)


class _Failing(Decoder):
    """Fails after its first step, beyond the warm-up."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.runner = decoder.runner

    def generate(self, requests: Sequence[Request]) -> Iterator[StepOutput]:
        self._decoder.runner = self.runner
        yield next(self._decoder.generate(requests))
        raise RuntimeError("injected")

    def step(self, progress: Progress) -> StepOutput:
        raise NotImplementedError


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_while_timed_and_as_it_was_afterwards(was_enabled: bool) -> None:
    clock = Clock()
    _Watching.enabled = set()
    decoder = build_decoder(_Watching(COUNTING, 3, 1, clock), num_slots=1)
    try:
        if not was_enabled:
            gc.disable()
        measure({"a": decoder}, blocks_of(1), warmup=0, clock=clock)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
    assert _Watching.enabled == {False}
    assert gc.get_freeze_count() == 0


def test_the_collector_is_on_again_after_a_failure() -> None:
    simulation = Simulation("a")
    simulation.decoders["a"] = _Failing(simulation.decoders["a"])
    with pytest.raises(RuntimeError, match="injected"):
        simulation.measure(blocks_of(1))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
