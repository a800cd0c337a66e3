"""Users' transformers processors: on the true text of each position, states taken back, others refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toy_engine import ToyRunner as Runner
from toy_engine import build_decoder, chain, collect, requests_for, toy_drafter
from toy_models import random_prompts, tiny_model
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, PreTrainedModel

from specdec import generate
from specdec.processors import Text
from specdec.sampling import Sampler
from specdec.types import SamplingParams
from specdec.user_processors import UserProcessor

TARGET = chain([[0.1, 0.5, 0.4], [0.45, 0.15, 0.4], [0.3, 0.5, 0.2]])
DRAFT = chain([[0.2, 0.3, 0.5], [0.5, 0.2, 0.3], [0.5, 0.3, 0.2]])


class BansEverySecond(LogitsProcessor):
    """Has a state: counts its calls, and bans token 1 at every second of them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            scores[:, 1] = -torch.inf
        return scores

    def snapshot(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


class BansTheBestEverySecond(BansEverySecond):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            scores[:, scores.argmax()] = -torch.inf
        return scores


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Declared(Unknown):
    stateless = True


def texts(factory: Any, speculative: bool, temperature: float = 0.0) -> dict[int, list[int]]:
    def sampler() -> Sampler:
        return Sampler(SamplingParams(temperature), (), [UserProcessor(factory)])

    drafter = toy_drafter(DRAFT, 3, 2, temperature) if speculative else None
    decoder = build_decoder(
        Runner(TARGET, 3, 2), num_slots=2, drafter=drafter, draft_length=3, sampler=sampler(), seed=1
    )
    return collect(decoder.generate(requests_for([[0], [1, 2], [2]], [9, 12, 7])))


@pytest.mark.parametrize(
    "factory",
    [
        lambda text: NoRepeatNGramLogitsProcessor(2),
        lambda text: BansEverySecond(),
        lambda text: Declared(),
    ],
    ids=["no_repeat", "stateful", "declared"],
)
def test_speculative_text_is_the_baselines(factory: Any) -> None:
    assert texts(factory, True) == texts(factory, False)


def test_a_processor_of_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Unknown is not known to be stateless"):
        texts(lambda text: Unknown(), False)


def test_each_request_has_a_processor_of_its_own() -> None:
    made: list[int] = []

    def factory(text: Text) -> LogitsProcessor:
        made.append(text.request_id)
        return Declared()

    texts(factory, True)
    assert sorted(made) == [0, 1, 2]


def test_a_state_goes_through_positions_that_were_skipped_and_comes_back_from_rejected_ones() -> None:
    processor = UserProcessor(lambda text: BansEverySecond())

    def banned(*token_ids: int) -> bool:
        scores = processor(torch.zeros(1, 3), [Text(0, [0, *token_ids], 1)])
        return bool(scores[0, 1] == -torch.inf)

    assert [banned(), banned(2), banned(2, 2)] == [False, True, False]
    assert banned(0) is True  # the token at the first position was rejected
    assert banned(0, 2, 2, 2, 0) is True  # the sixth call of a text decoded plainly


def test_generate_takes_them_and_a_draft_model_shares_their_state() -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    prompts = random_prompts([3, 7])

    def answers(drafter: PreTrainedModel | None) -> list[list[int]]:
        processors = [UserProcessor(lambda text: BansTheBestEverySecond())]
        return generate(model, prompts, drafter=drafter, max_new_tokens=15, processors=processors)

    assert answers(draft) == answers(model) == answers(None) != generate(model, prompts, max_new_tokens=15)
