"""Timed parts record every call, to the tick, and change nothing else."""

from __future__ import annotations

import torch
from toy_clock import (
    DECODE_S,
    OVERHEAD_S,
    PREFILL_S_PER_TOKEN,
    VERIFY_S,
    Clock,
    SimulatedRunner,
    spans,
)
from toy_engine import build_decoder, chain, collect, model_drafter, requests_for
from toy_models import random_prompts, tiny_model

from experiments.measure import measure
from experiments.metrics import passes
from experiments.recorder import Recorder
from experiments.timed import DRAFT_PHASES, TARGET_PHASES, TimedRunner, time_parts
from experiments.trace import PassEvent, Trace
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import SamplingParams

COUNTING = chain([[0, 1, 0], [0, 0, 1], [1, 0, 0]])  # 0 -> 1 -> 2 -> 0
DRAFT_SCALE = 0.25


def timed(
    clock: Clock, phases: dict[str, str] = TARGET_PHASES, num_slots: int = 2
) -> tuple[TimedRunner, Recorder]:
    recorder = Recorder(clock)
    return TimedRunner(SimulatedRunner(COUNTING, 3, num_slots, clock), recorder, phases), recorder


def recorded(recorder: Recorder) -> Trace:
    return recorder.trace("arm", 0, 0, 0.0, 0.0)


def test_each_call_is_one_event_to_the_tick() -> None:
    clock = Clock()
    runner, recorder = timed(clock)
    runner.prefill([[0] * 16], [0])
    runner.prefill([[0] * 4], [1])
    runner.decode(torch.tensor([[0], [1]]))
    runner.commit([17, 5])
    runner.verify(torch.tensor([[1, 2, 0], [2, 0, 0]]), [3, 1])
    runner.commit([18, 6])
    read, read_2 = 16 * PREFILL_S_PER_TOKEN, 20 * PREFILL_S_PER_TOKEN
    decoded = read_2 + DECODE_S
    verifying = decoded + OVERHEAD_S
    assert recorded(recorder).passes == [
        PassEvent("prefill", 0.0, read, (16,), 16, (16,), kv_tokens=16, other_kv_lengths=(0,)),
        PassEvent("prefill", read, read_2, (4,), 4, (4,), kv_tokens=20, other_kv_lengths=(16,)),
        PassEvent("decode", read_2, decoded, (1, 1), 1, kv_lengths=(17, 5), kv_tokens=22),
        PassEvent("verify", verifying, verifying + VERIFY_S, (3, 1), 3, kv_lengths=(20, 6), kv_tokens=26),
    ]


def test_a_prefill_of_several_rows_is_one_pass_each() -> None:
    runner, recorder = timed(Clock())
    logits = runner.prefill([[0, 1], [0, 1, 2]], [0, 1])
    assert [event.counts for event in recorded(recorder).passes] == [(2,), (3,)]
    assert logits.argmax(-1).tolist() == [2, 0]
    assert runner.lengths == (2, 3)


def test_padding_is_not_counted_as_tokens() -> None:
    runner, recorder = timed(Clock(), DRAFT_PHASES)
    runner.prefill([[0], [0]], [0, 1])
    runner.decode(torch.tensor([[1, 2], [1, 0]]), [2, 1])
    assert [event.phase for event in recorded(recorder).passes] == ["draft_prefill", "draft_prefill", "draft"]
    assert (recorded(recorder).passes[-1].counts, recorded(recorder).passes[-1].width) == ((2, 1), 2)


def test_the_drafters_passes_are_apart_from_the_targets() -> None:
    clock = Clock()
    drafter = DraftModelDrafter(
        SimulatedRunner(COUNTING, 3, 1, clock, DRAFT_SCALE), Sampler(SamplingParams(0.0))
    )
    decoder = build_decoder(
        SimulatedRunner(COUNTING, 3, 1, clock), num_slots=1, drafter=drafter, draft_length=2
    )
    recorder = time_parts(decoder, clock)
    text = collect(decoder.generate(requests_for([[0, 1, 2, 0]], 4)))
    assert text == {0: [1, 2, 0, 1]}
    trace = recorded(recorder)
    # Prompt of 4; then the draft model reads it (3 tokens, the newest comes with the first draft pass) and two
    # draft passes make two draft tokens, all accepted with a bonus token: four tokens in all.
    read = 4 * PREFILL_S_PER_TOKEN
    draft_read = read + DRAFT_SCALE * 4 * PREFILL_S_PER_TOKEN
    first, second = draft_read + DRAFT_SCALE * DECODE_S, draft_read + DRAFT_SCALE * 2 * DECODE_S
    assert [(e.phase, e.start_s, e.end_s, e.counts) for e in trace.passes] == [
        ("prefill", 0.0, read, (4,)),
        ("draft_prefill", read, draft_read, (4,)),
        ("draft", draft_read, first, (1,)),
        ("draft", first, second, (1,)),
        ("verify", second, second + VERIFY_S, (3,)),
    ]
    assert spans(trace.proposals) == [(read, second)]


def test_a_decoder_without_drafter_is_timed_too() -> None:
    clock = Clock()
    decoder = build_decoder(SimulatedRunner(COUNTING, 3, 1, clock), num_slots=1)
    recorder = time_parts(decoder, clock)
    collect(decoder.generate(requests_for([[0]], 3)))
    assert [event.phase for event in recorded(recorder).passes] == ["prefill", "decode", "decode"]
    assert recorded(recorder).proposals == []


def test_real_models_write_the_same_with_timers(one_thread: None) -> None:
    target, draft = tiny_model(seed=0), tiny_model(seed=1)
    prompts = random_prompts([3, 9, 5])
    texts = []
    for is_timed in (False, True):
        decoder = build_decoder(
            ModelRunner(target, 2, 32), num_slots=2, drafter=model_drafter(draft, 2, 32), draft_length=3
        )
        recorder = time_parts(decoder, Clock()) if is_timed else None
        texts.append(collect(decoder.generate(requests_for(prompts, [8, 12, 10]))))
    assert texts[0] == texts[1]
    assert recorder is not None
    phases = {event.phase for event in recorded(recorder).passes}
    assert phases == {"prefill", "draft_prefill", "draft", "verify", "decode"}  # a last token is not drafted


def test_restored_parts_are_those_before() -> None:
    model, prompts = tiny_model(), random_prompts([9])
    decoder = build_decoder(ModelRunner(model, 1, 40), num_slots=1, drafter=model_drafter(model, 1, 40))
    assert isinstance(decoder, SpeculativeDecoder)
    runner, drafter = decoder.runner, decoder.drafter
    assert isinstance(drafter, DraftModelDrafter)
    draft_runner = drafter.runner
    for _ in range(3):
        measure({"arm": decoder}, [requests_for(prompts, 4)], warmup=0)
    assert decoder.runner is runner
    assert decoder.drafter is drafter
    assert drafter.runner is draft_runner


def test_a_prompt_read_in_chunks_counts_its_passes() -> None:
    decoder = build_decoder(ModelRunner(tiny_model(), 1, 40, prefill_chunk=4), num_slots=1)
    (trace,) = measure({"arm": decoder}, [requests_for(random_prompts([9]), 2)], warmup=0)
    assert [event.num_passes for event in trace.passes] == [3, 1]
    assert passes([trace]) == {"passes/target": 4, "passes/draft": 0}
