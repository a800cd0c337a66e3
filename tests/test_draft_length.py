"""Draft lengths: the confident go on, the unprofitable stop, and come back."""

from __future__ import annotations

import pytest
import torch

from specdec.costs import PassCosts
from specdec.draft_length.confidence import ConfidenceOptions
from specdec.draft_length.cost_model import CostModelDraftLength, CostModelOptions, expected_tokens
from specdec.progress import Row
from specdec.types import Request

# A pass over t tokens takes 10 + t, a drafted token 1.
CHEAP = PassCosts(tuple(10.0 + t for t in range(9)), tuple(map(float, range(9))))
# A drafted token costs nearly a pass.
DEAR = PassCosts(tuple(10.0 + t for t in range(9)), tuple(9.0 * k for k in range(9)))


def row(request_id: int = 0) -> Row:
    return Row(Request(request_id, (1, 2), 500), 0)


def after(policy: CostModelDraftLength, fate: float, steps: int, only: Row | None = None) -> list[int]:
    """Lengths that the policy chose while a share `fate` of each draft stood."""
    chosen = []
    rows = [only or row()]
    for _ in range(steps):
        (limit,) = policy.limits(rows)
        chosen.append(limit)
        policy.accept(rows, [limit], [round(fate * limit)])
    return chosen


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0, 0.5, 0.5) == 1
    assert expected_tokens(1, 0.5, 0.9) == 1.5
    assert expected_tokens(3, 0.5, 0.5) == 1 + 0.5 * (1 + 0.5 + 0.25)
    assert expected_tokens(4, 1.0, 1.0) == 5


def test_the_best_length_is_the_one_with_the_most_tokens_per_time() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    for first, following in ((0.9, 0.9), (0.5, 0.5), (0.2, 0.9), (0.05, 0.05)):
        best = policy.best(first, following)
        rates = [1 / CHEAP.plain] + [
            expected_tokens(k, first, following) / CHEAP.step(k) for k in range(1, 9)
        ]
        assert rates[best] == max(rates)


def test_all_accepted_drafts_as_much_as_allowed() -> None:
    assert after(CostModelOptions(max=8).build(CHEAP), 1.0, 20)[-1] == 8


def test_nothing_accepted_stops_drafting_but_asks_again_ever_more_rarely() -> None:
    chosen = after(CostModelOptions(max=8).build(CHEAP), 0.0, 200)
    tried = [index for index, limit in enumerate(chosen) if limit and index > 20]
    assert 0 < len(tried) < 15
    assert all(chosen[index] <= 2 for index in tried)


def test_drafting_comes_back_when_it_pays_again() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    bad = row()
    assert after(policy, 0.0, 100, bad)[-1] == 0
    assert after(policy, 1.0, 150, bad)[-1] >= 4


def test_where_drafting_costs_as_much_as_decoding_nothing_is_drafted_for_long() -> None:
    chosen = after(CostModelOptions(max=8).build(DEAR), 0.5, 100)
    assert sum(limit > 0 for limit in chosen) < 15


def test_rows_learn_from_each_other() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    after(policy, 0.0, 60, row(0))
    (limit,) = policy.limits([row(1)])
    fresh = CostModelOptions(max=8).build(CHEAP)
    assert limit < fresh.limits([row(1)])[0]


def test_a_row_that_is_gone_is_forgotten() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    after(policy, 1.0, 3, row(0))
    policy.limits([row(1)])
    assert list(policy._rows) == [1]


def test_costs_go_on_beyond_their_table() -> None:
    costs = PassCosts((10.0, 12.0), (0.0, 3.0))
    assert costs.step(1) == 15.0
    assert costs.step(3) == 16.0 + 9.0
    assert PassCosts((10.0,), (1.0,)).step(5) == 11.0


def test_costs_are_checked_and_needed() -> None:
    with pytest.raises(ValueError, match="target"):
        PassCosts((), (1.0,))
    with pytest.raises(ValueError, match="cost_model needs"):
        CostModelOptions().build()


def test_confidence_goes_on_while_the_largest_probability_is_large() -> None:
    policy = ConfidenceOptions(min_prob=0.5).build()
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25], [0.5, 0.25, 0.25]]).log()
    assert policy.go_on(logits, 0) == [True, False, True]
    assert policy.limits([row(), row(1)]) == [8, 8]


def test_confidence_is_checked() -> None:
    with pytest.raises(ValueError, match=r"min_prob=1\.5"):
        ConfidenceOptions(min_prob=1.5)
