"""The contract of every drafter, and what each one proposes, by hand.

A drafter's state agrees with the text when what it proposes is what a drafter that has just been built proposes for
the same text. A new drafter joins by one line in DRAFTERS.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_engine import (
    CPU,
    ToyRunner,
    build_decoder,
    chain,
    collect,
    model_drafter,
    requests_for,
    script,
    toy_drafter,
)
from toy_models import VOCAB_SIZE, random_prompts, tiny_model
from transformers import PreTrainedModel

from specdec import ModelRunner
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from specdec.drafters.fallback import FallbackOptions
from specdec.drafters.layer_skip import LayerSkipOptions
from specdec.drafters.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from specdec.drafters.suffix import SuffixOptions
from specdec.draws import BlockDraws, KeyedDraws, Keys
from specdec.progress import Row, Vacancy
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Law, Request, SamplingParams, Verification

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SLOTS, CAPACITY = 3, 100
DRAFTERS: dict[str, DrafterOptions] = {
    "draft_model": DraftModelOptions(),
    "fallback": FallbackOptions(),
    "layer_skip": LayerSkipOptions(),
    "prompt_lookup": PromptLookupOptions(),
    "suffix": SuffixOptions(),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def build(name: str, model: PreTrainedModel, temperature: float = 0.0) -> Drafter:
    context = DrafterContext(
        NUM_SLOTS,
        CAPACITY,
        VOCAB_SIZE,
        CPU,
        Sampler(SamplingParams(temperature)),
        model,
        lambda weights: model,
    )
    return DRAFTERS[name].build(context)


def rows_of(texts: Sequence[Sequence[int]]) -> list[Row]:
    return [Row(Request(i, tuple(text), 60), slot) for slot, (i, text) in enumerate(enumerate(texts))]


def propose(
    drafter: Drafter,
    rows: Sequence[Row],
    limits: Sequence[int],
    go_on: GoOn | None = None,
    draws: KeyedDraws | None = None,
) -> DraftProposal:
    block = BlockDraws.of(
        draws or KeyedDraws(0),
        [row.request.request_id for row in rows],
        [len(row.token_ids) for row in rows],
        CPU,
    )
    proposal = drafter.propose(rows, limits, go_on or FixedDraftLength(1).go_on, block)
    assert proposal.token_ids.shape[0] == len(rows)
    assert len(proposal.lengths) == len(rows)
    for length, limit in zip(proposal.lengths, limits, strict=True):
        assert 0 <= length <= min(limit, proposal.token_ids.shape[1])
    return proposal


def drafts(proposal: DraftProposal) -> list[list[int]]:
    return [
        tokens[:length] for tokens, length in zip(proposal.token_ids.tolist(), proposal.lengths, strict=True)
    ]


def assert_same_proposal(left: DraftProposal, right: DraftProposal) -> None:
    assert drafts(left) == drafts(right)
    for offset in range(left.token_ids.shape[1]):
        for row, length in enumerate(left.lengths):
            if offset < length:
                both = [proposal.laws.at(offset) for proposal in (left, right)]
                assert (both[0].ids is None) == (both[1].ids is None)
                if both[0].probs is not None and both[1].probs is not None:
                    torch.testing.assert_close(both[0].probs[row], both[1].probs[row], rtol=0, atol=1e-12)


def accept(
    drafter: Drafter,
    rows: Sequence[Row],
    proposal: DraftProposal,
    accepted: Sequence[int],
    next_ids: Sequence[int],
) -> None:
    """What a step of the decoder does with a proposal."""
    drafter.accept(rows, Verification(tuple(accepted), tuple(next_ids)))
    for row, tokens, kept, following in zip(rows, drafts(proposal), accepted, next_ids, strict=True):
        row.token_ids += [*tokens[:kept], following]


every_drafter = pytest.mark.parametrize("name", sorted(DRAFTERS))
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])


@every_drafter
@temperatures
@pytest.mark.parametrize("outcome", ["all", "none", "random"])
def test_the_state_agrees_with_the_text(
    name: str, temperature: float, outcome: str, model: PreTrainedModel
) -> None:
    """Ragged limits from 0 on, and any number accepted, full acceptance and nothing proposed included."""
    choose = random.Random(7)
    drafter = build(name, model, temperature)
    rows = rows_of([text * 2 for text in random_prompts([3, 9, 1])])
    for _ in range(8):
        limits = [choose.randrange(5) for _ in rows]
        proposal = propose(drafter, rows, limits)
        assert_same_proposal(proposal, propose(build(name, model, temperature), rows, limits))
        accepted = [
            {"all": length, "none": 0, "random": choose.randint(0, length)}[outcome]
            for length in proposal.lengths
        ]
        accept(drafter, rows, proposal, accepted, [choose.randrange(VOCAB_SIZE) for _ in rows])


@every_drafter
@temperatures
def test_the_state_follows_rows_that_move_and_slots_that_are_refilled(
    name: str, temperature: float, model: PreTrainedModel
) -> None:
    drafter = build(name, model, temperature)
    rows = rows_of(random_prompts([6, 9, 4]))
    accept(drafter, rows, proposal := propose(drafter, rows, [3, 2, 4]), proposal.lengths, [5, 6, 7])
    # slot 0 is finished, the row of slot 2 moves there
    drafter.vacate(Vacancy(0, replacement=2))
    rows = [rows[2], rows[1]]
    rows[0].slot = 0
    proposal = propose(drafter, rows, [3, 0])
    assert_same_proposal(proposal, propose(build(name, model, temperature), rows, [3, 0]))
    accept(drafter, rows, proposal, [1 if proposal.lengths[0] else 0, 0], [8, 9])
    # slot 1 is finished and gets a new request
    drafter.vacate(Vacancy(1))
    rows[1] = Row(Request(9, tuple(random_prompts([12], seed=3)[0]), 60), 1)
    proposal = propose(drafter, rows, [2, 4])
    assert_same_proposal(proposal, propose(build(name, model, temperature), rows, [2, 4]))


@every_drafter
def test_no_token_allowed_is_no_token_proposed(name: str, model: PreTrainedModel) -> None:
    drafter = build(name, model)
    rows = rows_of([[1, 2, 1, 2, 1], [3, 3, 3]])
    for limits in ([0, 0], [0, 3], [0, 0], [3, 0]):
        proposal = propose(drafter, rows, limits)
        assert all(length <= limit for length, limit in zip(proposal.lengths, limits, strict=True))
        accept(drafter, rows, proposal, proposal.lengths, [1, 3])


@every_drafter
@temperatures
def test_a_row_does_not_depend_on_its_batch_mates(
    name: str, temperature: float, model: PreTrainedModel
) -> None:
    texts = [text * 2 for text in random_prompts([4, 7, 5])]
    together = propose(build(name, model, temperature), rows_of(texts), [4, 4, 4])
    for index, text in enumerate(texts):
        alone = [Row(Request(index, tuple(text), 60), 0)]
        assert drafts(propose(build(name, model, temperature), alone, [4])) == [drafts(together)[index]]


class RecordingDraws(KeyedDraws):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.laws: list[Law] = []

    def pick(self, law: Law, keys: Keys) -> Tensor:
        self.laws.append(law)
        return super().pick(law, keys)


@every_drafter
@temperatures
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reported_law_is_the_drawn_law(name: str, temperature: float, dtype: torch.dtype) -> None:
    draws = RecordingDraws(3)
    drafter = build(name, tiny_model("llama", dtype=dtype), temperature)
    proposal = propose(
        drafter, rows_of([text * 2 for text in random_prompts([4, 7, 5])]), [4, 2, 3], draws=draws
    )
    if proposal.laws.ids is not None:
        for tokens, ids, length in zip(
            proposal.token_ids.tolist(), proposal.laws.ids.tolist(), proposal.lengths, strict=True
        ):
            assert tokens[:length] == ids[:length]
    else:
        for offset, law in enumerate(draws.laws):
            assert law.probs is not None
            reported = proposal.laws.at(offset).probs
            assert reported is not None
            assert reported.dtype == law.probs.dtype
            assert torch.equal(reported, law.probs)
    chosen = proposal.laws.prob(proposal.token_ids)
    for row, length in enumerate(proposal.lengths):
        assert (chosen[row, :length] > 0).all()


# Draft model


def test_go_on_is_asked_before_each_draw_and_a_row_that_stopped_stays_stopped(model: PreTrainedModel) -> None:
    asked: list[int] = []

    def go_on(logits: Tensor, step: int) -> Sequence[bool]:
        asked.append(step)
        assert logits.shape == (3, VOCAB_SIZE)
        return [[True, True, True], [True, False, True], [True, True, False], [True, True, True]][step]

    drafter = build("draft_model", model, temperature=1.0)
    rows = rows_of(random_prompts([4, 7, 5]))
    proposal = propose(drafter, rows, [4, 4, 3], go_on)
    assert asked == [0, 1, 2, 3]
    assert proposal.lengths == (4, 1, 2)
    accept(drafter, rows, proposal, proposal.lengths, [1, 2, 3])
    again = propose(drafter, rows, [2, 2, 2])
    assert_same_proposal(again, propose(build("draft_model", model, 1.0), rows, [2, 2, 2]))


def test_go_on_may_refuse_at_once(model: PreTrainedModel) -> None:
    drafter = build("draft_model", model)
    rows = rows_of(random_prompts([4, 7]))
    proposal = propose(drafter, rows, [4, 4], lambda logits, step: [False, False])
    assert proposal.lengths == (0, 0)
    accept(drafter, rows, proposal, [0, 0], [1, 2])
    assert_same_proposal(propose(drafter, rows, [2, 2]), propose(build("draft_model", model), rows, [2, 2]))


def test_one_pass_per_token_and_none_for_the_last() -> None:
    """Prompt once, then one pass per draft token but the last, which is read when it is accepted."""
    drafter = toy_drafter(chain([[0.0, 1.0], [1.0, 0.0]]), 2, 2)
    assert isinstance(drafter.runner, ToyRunner)
    rows = rows_of([[0, 1, 0], [1, 0]])
    proposal = propose(drafter, rows, [3, 1])
    assert drafts(proposal) == [[1, 0, 1], [0 + 1]]
    assert drafter.runner.passes == [
        ("prefill", ((0, 1), (1,))),
        ("decode", ((0,), (0,))),
        ("decode", ((1,), ())),
        ("decode", ((0,), ())),
    ]
    assert drafter.runner.lengths == (5, 2)
    accept(drafter, rows, proposal, [3, 0], [0, 1])
    assert drafter.runner.lengths == (5, 2)
    drafter.runner.passes.clear()
    propose(drafter, rows, [1, 1])
    assert drafter.runner.passes == [
        ("decode", ((1, 0), (1,)))
    ]  # the last accepted draft token and the bonus token


def test_a_row_that_stopped_reads_nothing_more() -> None:
    drafter = toy_drafter(chain([[0.0, 1.0], [1.0, 0.0]]), 2, 2)
    assert isinstance(drafter.runner, ToyRunner)
    rows = rows_of([[0, 1, 0], [1, 0]])
    proposal = propose(drafter, rows, [3, 3], lambda law, step: [True, step < 1])
    assert proposal.lengths == (3, 1)
    # whether the second row goes on is asked behind its first draft token, so that one is read
    assert drafter.runner.passes[2:] == [("decode", ((1,), (1,))), ("decode", ((0,), ()))]


def test_a_row_that_wants_nothing_costs_nothing() -> None:
    drafter = toy_drafter(chain([[0.0, 1.0], [1.0, 0.0]]), 2, 2)
    assert isinstance(drafter.runner, ToyRunner)
    rows = rows_of([[0, 1], [1, 0]])
    propose(drafter, rows, [0, 0])
    assert drafter.runner.passes == []
    propose(drafter, rows, [0, 1])
    assert drafter.runner.passes == [("prefill", ((1,),)), ("decode", ((), (0,)))]


@temperatures
@pytest.mark.parametrize("draft_length", [1, 4])
def test_a_draft_that_is_the_target_is_always_accepted(
    temperature: float, draft_length: int, model: PreTrainedModel
) -> None:
    """Acceptance 1.0 at every step, and the draft's cache holds what the target's holds.

    Up to the last accepted draft token, which the draft model reads together with the bonus token.
    """
    prompts = random_prompts([3, 9, 17])
    runner = ModelRunner(model, 3, 50)
    drafter = model_drafter(model, 3, 50, temperature)
    decoder = build_decoder(
        runner, num_slots=3, drafter=drafter, draft_length=draft_length, temperature=temperature
    )
    for step in decoder.generate(requests_for(prompts, [20, 30, 25])):
        assert step.accepted == step.drafted
        for slot, drafted in enumerate(step.drafted):
            if drafted:
                assert drafter.runner.lengths[slot] == runner.lengths[slot] - 1


def test_acceptance_of_a_known_pair_of_laws() -> None:
    """The summed minimum of both laws: 0.5, in 3000 steps within five standard deviations (false alarm 1e-6)."""
    target, draft = [0.5, 0.3, 0.2], [0.0, 0.3, 0.7]
    decoder = build_decoder(
        ToyRunner(lambda text: target, 3, 1),
        num_slots=1,
        drafter=toy_drafter(lambda text: draft, 3, 1, temperature=1),
        draft_length=1,
        temperature=1,
    )
    drafted = accepted = 0
    for step in decoder.generate(requests_for([[0]], 3000)):
        drafted += sum(step.drafted)
        accepted += sum(step.accepted)
    assert drafted > 1500
    assert abs(accepted / drafted - 0.5) < 5 * 0.5 / drafted**0.5


def test_a_vocabulary_of_another_size_is_refused(model: PreTrainedModel) -> None:
    context = DrafterContext(1, 20, 70, CPU, Sampler(SamplingParams()), model, lambda weights: model)
    with pytest.raises(ValueError, match=r"vocabulary of 61 tokens, the target one of 70"):
        DraftModelOptions().build(context)


def test_the_weight_format_is_the_callers_business(model: PreTrainedModel) -> None:
    asked: list[str] = []

    def load(weights: str) -> PreTrainedModel:
        asked.append(weights)
        return model

    context = DrafterContext(1, 20, VOCAB_SIZE, CPU, Sampler(SamplingParams()), model, load)
    assert isinstance(DraftModelOptions("int4").build(context), DraftModelDrafter)
    DraftModelOptions().build(context)
    assert asked == ["int4", ""]


@pytest.mark.parametrize("kind", [DraftModelOptions, FallbackOptions])
def test_a_copy_of_the_target_is_asked_for_as_such(model: PreTrainedModel, kind: Any) -> None:
    asked: list[str] = []

    def load(weights: str) -> PreTrainedModel:
        asked.append(weights)
        return model

    def refuse(weights: str) -> PreTrainedModel:
        raise AssertionError("another model was asked for")

    basis = (1, 20, VOCAB_SIZE, CPU, Sampler(SamplingParams()), model)
    kind(weights="int4", model="target").build(DrafterContext(*basis, refuse, load_target_copy=load))
    assert asked == ["int4"]
    kind(weights="int4").build(DrafterContext(*basis, load, load_target_copy=refuse))
    with pytest.raises(ValueError, match=r"drafter\.model=target: .* pass the model itself"):
        kind(model="target").build(DrafterContext(*basis, refuse))


# Prompt lookup


@pytest.mark.parametrize(
    ("text", "limit", "draft"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),  # (1, 2) occurred at the start
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 9, 1, 2], 0, []),
        ([1, 2, 3, 4], 3, []),  # nothing occurs twice
        ([7], 3, []),
        # a copy that reaches the end goes on with what it copied itself
        ([7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 1, 2, 3, 1], 5, [2, 3, 1, 2, 3]),
        # the longest n-gram wins over a more recent shorter one
        ([5, 6, 7, 1, 2, 7, 3, 5, 6, 7], 2, [1, 2]),
        # of equally long ones the most recent
        ([6, 7, 1, 8, 6, 7, 2, 8, 6, 7], 2, [2, 8]),
        # no n-gram longer than max_ngram = 3 is looked at
        ([1, 2, 3, 4, 9, 8, 2, 3, 4, 5, 1, 2, 3, 4], 2, [5, 1]),
    ],
)
def test_prompt_lookup_by_hand(text: list[int], limit: int, draft: list[int]) -> None:
    drafter = PromptLookupDrafter(1, 3, CPU)
    assert drafts(propose(drafter, rows_of([text]), [limit])) == [draft]


def test_prompt_lookup_of_rows_of_unequal_fortune() -> None:
    drafter = PromptLookupDrafter(2, 3, CPU)
    proposal = propose(drafter, rows_of([[1, 2, 3, 1, 2], [1, 2, 3], [4, 5, 4, 4, 5]]), [2, 2, 4])
    assert drafts(proposal) == [[3, 1], [], [4, 4, 5, 4]]
    assert proposal.laws.ids is not None


def test_prompt_lookup_respects_the_shortest_n_gram() -> None:
    text = [1, 2, 9, 3, 2]
    assert drafts(propose(PromptLookupDrafter(1, 3, CPU), rows_of([text]), [2])) == [[9, 3]]
    assert drafts(propose(PromptLookupDrafter(2, 3, CPU), rows_of([text]), [2])) == [[]]


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 3), (4, 3), (-1, -1)])
def test_prompt_lookup_options_are_checked(min_ngram: int, max_ngram: int) -> None:
    with pytest.raises(ValueError, match=f"min_ngram={min_ngram}, max_ngram={max_ngram}"):
        PromptLookupOptions(min_ngram, max_ngram)


def test_prompt_lookup_speeds_up_a_looping_text() -> None:
    """A text that repeats with period 4 is copied once its period has been seen."""
    loop = [3, 1, 4, 2]
    decoder = build_decoder(
        ToyRunner(script(loop, 5, 1), 5, 1),
        num_slots=1,
        drafter=PromptLookupDrafter(1, 3, CPU),
        draft_length=3,
    )
    steps = list(decoder.generate(requests_for([[0]], 40)))
    assert collect(steps)[0] == loop * 10
    assert len(steps) < 20
