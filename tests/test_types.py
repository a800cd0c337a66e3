"""The values that the engine passes around."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from specdec.types import DraftProposal, Law, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def dense(rows: object) -> Law:
    return Law(probs=torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf, -math.inf, 1e-40, 5e-324])
def test_temperature_is_checked(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.*0 is greedy"):
        SamplingParams(temperature)


def test_greedy_is_the_default() -> None:
    assert SamplingParams().temperature == 0


def test_a_request_needs_a_prompt_and_room_for_an_answer() -> None:
    assert Request(0, (1, 2, 3), 5).max_length == 8
    with pytest.raises(ValueError, match="request 7: the prompt has no tokens"):
        Request(7, (), 5)
    with pytest.raises(ValueError, match="request 7: max_new_tokens=0"):
        Request(7, (1,), 0)


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(0, (1,), 1).max_new_tokens = 2  # type: ignore[misc]


def test_a_law_is_dense_or_one_hot() -> None:
    for arguments in ({}, {"probs": torch.ones(1, 1), "ids": torch.zeros(1)}):
        with pytest.raises(ValueError, match="exactly one"):
            Law(**arguments)


def test_prob() -> None:
    law = dense([[0.2, 0.8], [0.5, 0.5]])
    assert law.prob(torch.tensor([1, 0])).tolist() == [0.8, 0.5]
    assert law.prob(torch.tensor([1, 0])).dtype == torch.float64
    assert Law(probs=torch.tensor([[0.25, 0.75]])).prob(torch.tensor([1])).dtype == torch.float64
    certain = Law(ids=torch.tensor([[1, 2], [0, 0]])).prob(torch.tensor([[1, 1], [2, 0]]))
    assert certain.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert certain.dtype == torch.float64


def test_at_and_take() -> None:
    laws = dense([[[0.1, 0.9], [0.2, 0.8]], [[0.3, 0.7], [0.4, 0.6]]])
    at = laws.at(1)
    take = laws.take(torch.tensor([1, 0]))
    assert at.probs is not None
    assert at.probs.tolist() == [[0.2, 0.8], [0.4, 0.6]]
    assert take.probs is not None
    assert take.probs.tolist() == [[0.2, 0.8], [0.3, 0.7]]
    certain = Law(ids=torch.tensor([[5, 6], [7, 8]]))
    assert certain.at(1).ids is not None
    assert certain.at(1).ids.tolist() == [6, 8]  # type: ignore[union-attr]
    assert certain.take(torch.tensor([1, 0])).ids.tolist() == [6, 7]  # type: ignore[union-attr]


def residual(target: Law, draft: Law) -> list[list[float]]:
    law = target.residual(draft)
    assert law.probs is not None
    assert law.probs.dtype == torch.float64
    return law.probs.tolist()


def test_residual_of_dense_laws() -> None:
    [row] = residual(dense([[0.4, 0.25, 0.35]]), dense([[0.8, 0.15, 0.05]]))
    assert row == pytest.approx([0, 0.1 / 0.4, 0.3 / 0.4])


def test_residual_against_a_certain_draft_is_the_target_without_that_token() -> None:
    [row] = residual(dense([[0.4, 0.25, 0.35]]), Law(ids=torch.tensor([0])))
    assert row == pytest.approx([0, 0.25 / 0.6, 0.35 / 0.6])


def test_residual_of_nothing_is_the_target() -> None:
    target = dense([[0.4, 0.6], [1.0, 0.0], [0.4, 0.6]])
    draft = dense([[0.4, 0.6], [1.0, 0.0], [0.5, 0.5]])
    rows = residual(target, draft)
    assert rows[:2] == [[0.4, 0.6], [1.0, 0.0]]
    assert rows[2] == pytest.approx([0, 1])
    assert residual(dense([[1.0, 0.0]]), Law(ids=torch.tensor([0]))) == [[1.0, 0.0]]


def test_residual_keeps_a_difference_below_float32() -> None:
    [row] = residual(dense([[0.5 + 1e-12, 0.5 - 1e-12]]), dense([[0.5, 0.5]]))
    assert row == [1.0, 0.0]


def test_residual_of_a_certain_target_is_itself() -> None:
    target = Law(ids=torch.tensor([1, 2]))
    assert target.residual(dense([[0.2, 0.3, 0.5]] * 2)) is target
    assert target.residual(Law(ids=torch.tensor([1, 0]))) is target


def test_residual_of_mixed_precision() -> None:
    target = Law(probs=torch.tensor([[0.25, 0.75]]))
    [row] = residual(target, dense([[0.5, 0.5]]))
    assert row == [0, 1]


def test_stack() -> None:
    stacked = Law.stack([dense([[0.1, 0.9], [0.2, 0.8]]), dense([[0.3, 0.7], [0.4, 0.6]])])
    assert stacked.probs is not None
    assert stacked.probs.shape == (2, 2, 2)
    assert stacked.probs[0].tolist() == [[0.1, 0.9], [0.3, 0.7]]
    certain = Law.stack([Law(ids=torch.tensor([1, 2])), Law(ids=torch.tensor([3, 4]))])
    assert certain.ids is not None
    assert certain.ids.tolist() == [[1, 3], [2, 4]]


def test_a_proposal_of_nothing() -> None:
    for proposal in (DraftProposal.nothing(3, CPU), DraftProposal.certain([[], [], []], CPU)):
        assert proposal.token_ids.shape == (3, 0)
        assert proposal.token_ids.dtype == torch.long
        assert proposal.lengths == (0, 0, 0)
        assert proposal.laws.ids is not None


def test_a_proposal_of_certain_drafts() -> None:
    proposal = DraftProposal.certain([[4, 5, 6], [], [7]], CPU)
    assert proposal.token_ids.tolist() == [[4, 5, 6], [0, 0, 0], [7, 0, 0]]
    assert proposal.lengths == (3, 0, 1)
    assert proposal.laws.prob(proposal.token_ids).eq(1).all()
