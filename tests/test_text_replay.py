"""Replays give the target's own logits behind a committed text, whatever the shape of the passes."""

from __future__ import annotations

import pytest
import torch
from toy_engine import ToyRunner, build_decoder, chain, requests_for
from toy_models import greedy_reference, random_prompts, tiny_model
from toy_traces import forward, step, trace
from transformers import PreTrainedModel

from experiments.text_replay import PlannedPass, read_at_once, recorded_plan, replay, single_token_plan
from specdec.decoding.base import DecodingParts
from specdec.progress import StopTokens
from specdec.runner import ModelRunner, Runner
from specdec.types import Request

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTING = chain([[0, 1, 0], [0, 0, 1], [1, 0, 0]])  # 0 -> 1 -> 2 -> 0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def parts_of(runner: Runner, num_slots: int, temperature: float = 0.0) -> DecodingParts:
    decoder = build_decoder(runner, num_slots=num_slots, temperature=temperature)
    return DecodingParts(runner, decoder.sampler, decoder.draws, StopTokens(), num_slots)


def fresh_logits(model: PreTrainedModel, request: Request, answer: list[int], index: int) -> torch.Tensor:
    """transformers' own forward over the prompt and the first `index` new tokens."""
    with torch.no_grad():
        return model(torch.tensor([[*request.prompt_ids, *answer[:index]]])).logits[0, -1]


def test_the_recorded_plan_has_each_requests_own_passes() -> None:
    recorded = trace(
        step(0.0, 1.0, "prefill", {4: [1], 2: [2]}),
        step(1.0, 2.0, "verify", {4: [3, 4], 2: [5]}, drafted=[3, 1], accepted=[1, 0]),
        step(2.0, 3.0, "prefill", {9: [6]}),
        step(3.0, 4.0, "verify", {4: [7], 9: [8, 9, 10]}, drafted=[0, 2], accepted=[0, 2]),
        passes=[
            forward("prefill", 0.0, 1.0, [3]),
            forward("draft", 1.0, 1.25, [1, 1]),
            forward("verify", 1.25, 2.0, [4, 2]),
            forward("verify", 3.0, 4.0, [1, 3]),
        ],
    )
    assert recorded_plan(recorded) == {
        4: [PlannedPass(3, 1), PlannedPass(0, 0)],
        2: [PlannedPass(1, 0)],
        9: [PlannedPass(2, 2)],
    }


def test_a_step_without_drafts_is_a_pass_of_one_token() -> None:
    recorded = trace(
        step(0.0, 1.0, "prefill", {0: [1]}),
        step(1.0, 2.0, "decode", {0: [2]}),
        step(2.0, 3.0, "verify", {0: [3, 4]}, drafted=[2], accepted=[1]),
        step(3.0, 4.0, "decode", {0: [5]}),
        passes=[
            forward("prefill", 0.0, 1.0, [3]),
            forward("decode", 1.0, 2.0, [1]),
            forward("verify", 2.0, 3.0, [3]),
            forward("decode", 3.0, 4.0, [1]),
        ],
    )
    assert recorded_plan(recorded) == {0: [PlannedPass(0, 0), PlannedPass(2, 1), PlannedPass(0, 0)]}


def test_the_plan_keeps_the_width_of_a_pass_that_a_stop_cut_short() -> None:
    """5 tokens went through the pass, 2 were committed and 1 counts as drafted: the pass was still 5 wide."""
    cut = trace(
        step(0.0, 1.0, "verify", {0: [3, 4]}, drafted=[1], accepted=[1]),
        passes=[forward("verify", 0.0, 1.0, [5])],
    )
    assert recorded_plan(cut) == {0: [PlannedPass(4, 1)]}


def test_a_single_token_plan_has_one_pass_per_token_behind_the_first() -> None:
    assert single_token_plan({0: [5, 6, 7], 1: [5]}) == {0: [PlannedPass(0, 0)] * 2, 1: []}


@pytest.mark.parametrize("shape", ["single tokens", "ragged passes"])
def test_a_replay_gives_the_logits_of_a_fresh_forward(model: PreTrainedModel, shape: str) -> None:
    block = requests_for(random_prompts([4, 9]), 9)
    answers = {r.request_id: greedy_reference(model, list(r.prompt_ids), 9) for r in block}
    plan = {
        # 1 + (1 + 2) + (1 + 0) + (1 + 3) tokens, and 1 + (1 + 0) + (1 + 4) + 2: with rejected ones between.
        0: [PlannedPass(4, 2), PlannedPass(3, 0), PlannedPass(3, 3)],
        1: [PlannedPass(1, 0), PlannedPass(4, 4), PlannedPass(2, 1)],
    }
    wanted = [(request_id, index) for request_id in answers for index in range(1, 9)]
    found = replay(
        parts_of(ModelRunner(model, 2, 32), 2),
        block,
        answers,
        plan if shape == "ragged passes" else single_token_plan(answers),
        wanted,
    )
    assert set(found) == set(wanted)
    for (request_id, index), logits in found.items():
        expected = fresh_logits(model, block[request_id], answers[request_id], index)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_a_text_that_is_not_the_targets_is_followed_all_the_same(model: PreTrainedModel) -> None:
    block = requests_for(random_prompts([5]), 6)
    # all but the first token, which is the prefill's
    answers = {0: [*greedy_reference(model, list(block[0].prompt_ids), 1), 1, 4, 1, 5, 9]}
    found = replay(
        parts_of(ModelRunner(model, 1, 16), 1), block, answers, single_token_plan(answers), [(0, 2), (0, 5)]
    )
    for (_, index), logits in found.items():
        expected = fresh_logits(model, block[0], answers[0], index)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_reading_at_once_gives_the_same_logits(model: PreTrainedModel) -> None:
    block = requests_for(random_prompts([5, 3]), 6)
    answers = {0: [3, 1, 4, 1, 5, 9], 1: [2, 7, 1, 8, 2, 8]}
    runner = ModelRunner(model, 2, 16)
    found = read_at_once(parts_of(runner, 2), block, answers, [(0, 0), (1, 4)])
    assert set(found) == {(0, 0), (1, 4)}
    for (request_id, index), logits in found.items():
        expected = fresh_logits(model, block[request_id], answers[request_id], index)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert runner.lengths == (0, 0)


def test_a_replay_ends_where_nothing_more_is_wanted() -> None:
    runner = ToyRunner(COUNTING, 3, 1)
    answers = {0: [1, 2, 0, 1, 2, 0, 1, 2]}
    block = requests_for([[0]], 8)
    found = replay(parts_of(runner, 1), block, answers, single_token_plan(answers), [(0, 2)])
    assert found[(0, 2)].argmax() == 0
    assert [verb for verb, _ in runner.passes] == ["prefill", "decode", "decode"]
    assert runner.lengths == (0,)


def test_a_first_token_is_never_reached() -> None:
    answers = {0: [1, 2]}
    plan = single_token_plan(answers)
    block = requests_for([[0]], 2)
    assert replay(parts_of(ToyRunner(COUNTING, 3, 1), 1), block, answers, plan, [(0, 0)]) == {}


def test_replay_is_for_greedy_decoding() -> None:
    answers = {0: [1, 2]}
    parts = parts_of(ToyRunner(COUNTING, 3, 1), 1, temperature=1.0)
    with pytest.raises(ValueError, match="greedy"):
        replay(parts, requests_for([[0]], 2), answers, single_token_plan(answers), [(0, 1)])
