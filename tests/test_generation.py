"""The library function: defaults, errors, and what it leaves of the caller's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_models import greedy_reference, random_prompts, tiny_model
from transformers import GenerationConfig, PreTrainedModel

from specdec import PromptLookupOptions, generate, generate_steps
from specdec.drafters.draft_model import DraftModelOptions
from specdec.generation import end_of_text_ids
from specdec.types import Phase

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


PROMPTS = random_prompts([3, 9, 5])


def test_answers_come_in_the_order_of_the_prompts(model: PreTrainedModel) -> None:
    expected = [greedy_reference(model, prompt, 8) for prompt in PROMPTS]
    for num_slots in (None, 1, 2, 5):
        assert generate(model, PROMPTS, max_new_tokens=8, num_slots=num_slots) == expected


def test_64_new_tokens_by_default(model: PreTrainedModel) -> None:
    assert [len(answer) for answer in generate(model, PROMPTS[:1])] == [64]


def test_any_sequence_is_a_prompt(model: PreTrainedModel) -> None:
    expected = generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert generate(model, ((1, 2, 3),), max_new_tokens=4) == expected
    assert generate(model, [range(1, 4)], max_new_tokens=4) == expected


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [
        (None, None, frozenset()),
        (7, None, frozenset([7])),
        (0, None, frozenset([0])),
        ([7, 8], None, frozenset([7, 8])),
        (7, 9, frozenset([9])),
        (7, [9, 10], frozenset([9, 10])),
        (None, 0, frozenset([0])),
    ],
)
def test_end_of_text_ids(
    eos: int | list[int] | None, generation_eos: int | list[int] | None, expected: frozenset[int]
) -> None:
    model = tiny_model("llama", eos_token_id=eos)
    model.generation_config = GenerationConfig(eos_token_id=generation_eos)
    assert end_of_text_ids(model) == expected


def test_an_answer_ends_with_the_models_end_of_text_by_default() -> None:
    prompt = PROMPTS[1]
    stop = greedy_reference(tiny_model("llama"), prompt, 3)[2]
    model = tiny_model("llama", eos_token_id=stop)
    expected = greedy_reference(model, prompt, 20, [stop])
    assert expected[-1] == stop
    for drafter in (None, model, PromptLookupOptions()):
        assert generate(model, [prompt], drafter=drafter, max_new_tokens=20) == [expected]
        [endless] = generate(model, [prompt], drafter=drafter, max_new_tokens=20, stop_token_ids=())
        assert len(endless) == 20


def test_no_prompts(model: PreTrainedModel) -> None:
    assert generate(model, []) == []
    assert list(generate_steps(model, [])) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_length": 0}, "draft_length=0"),
        ({"draft_length": -3}, "draft_length=-3"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"max_new_tokens": 126}, "context of 128"),
        ({"drafter": DraftModelOptions()}, "needs a draft model"),
    ],
)
def test_bad_values_are_named(model: PreTrainedModel, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, [[1, 2, 3]], **arguments)  # type: ignore[arg-type]


def test_errors_come_before_the_first_step(model: PreTrainedModel) -> None:
    """From the call itself, not from the first `next()`."""
    with pytest.raises(ValueError, match="temperature"):
        generate_steps(model, [[1]], temperature=-1)


def test_an_empty_prompt_is_named(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="request 1: the prompt has no tokens"):
        generate(model, [[1], []])


def test_a_draft_model_of_another_vocabulary(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"vocabulary of 50 tokens, the target one of 61"):
        generate(model, [[1, 2]], drafter=tiny_model("llama", vocab_size=50))


def test_a_draft_model_with_a_shorter_context(model: PreTrainedModel) -> None:
    draft = tiny_model("llama", max_position_embeddings=8)
    with pytest.raises(ValueError, match="context of 8"):
        generate(model, [[1, 2]], drafter=draft, max_new_tokens=20)


def test_a_token_outside_the_vocabulary(model: PreTrainedModel) -> None:
    with pytest.raises(IndexError):
        generate(model, [[1, 61]], max_new_tokens=2)
    # and the model is fine afterwards
    assert generate(model, [[1, 2]], max_new_tokens=2) == [greedy_reference(model, [1, 2], 2)]


@pytest.mark.parametrize("drafter", [None, "itself", "lookup"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_callers_model_still_works_with_transformers(drafter: str | None, attention: str) -> None:
    model = tiny_model("llama", attn_implementation=attention)
    before = [greedy_reference(model, prompt, 8) for prompt in PROMPTS]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    chosen = {None: None, "itself": model, "lookup": PromptLookupOptions()}[drafter]
    assert generate(model, PROMPTS, drafter=chosen, max_new_tokens=8) == before
    assert [greedy_reference(model, prompt, 8) for prompt in PROMPTS] == before
    assert model.config._attn_implementation == attention
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_also_when_a_run_is_given_up_half_way(model: PreTrainedModel) -> None:
    steps = generate_steps(model, PROMPTS, drafter=model, max_new_tokens=8)
    next(steps)
    next(steps)
    assert greedy_reference(model, PROMPTS[0], 8) == generate(model, PROMPTS[:1], max_new_tokens=8)[0]


def test_the_first_step_is_the_prefill_of_all(model: PreTrainedModel) -> None:
    first, *rest = generate_steps(model, PROMPTS, drafter=model, max_new_tokens=8, draft_length=3)
    assert first.phase == Phase.PREFILL
    assert first.request_ids == (0, 1, 2)
    assert [len(tokens) for tokens in first.committed] == [1, 1, 1]
    assert {step.phase for step in rest} == {Phase.VERIFY}


def test_a_seed_is_a_seed(model: PreTrainedModel) -> None:
    def answers(seed: int, drafter: PromptLookupOptions | PreTrainedModel | None = None) -> list[list[int]]:
        return generate(model, PROMPTS, temperature=1.0, seed=seed, max_new_tokens=12, drafter=drafter)

    for drafter in (None, model, PromptLookupOptions()):
        assert answers(1, drafter) == answers(1, drafter)
        assert answers(1, drafter) != answers(2, drafter)
    torch.manual_seed(0)
    first = answers(5)
    torch.manual_seed(1)
    assert answers(5) == first


@pytest.mark.parametrize(("prompts", "shown"), [([3, 4], "3"), (["hello"], "'hello'"), ("hello", "'h'")])
def test_text_or_a_bare_prompt_is_told_what_is_expected(prompts: Any, shown: str) -> None:
    with pytest.raises(ValueError, match="expected a list of prompts, each a list of token ids") as caught:
        generate(tiny_model(), prompts)
    assert f"prompt 0 is {shown}:" in str(caught.value)
