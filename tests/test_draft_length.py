"""Draft lengths: the confident go on, the unprofitable stop, and come back."""

from __future__ import annotations

import pytest
import torch

from specdec.costs import PassCosts
from specdec.draft_length.confidence import ConfidenceOptions
from specdec.draft_length.cost_model import (
    TRIAL_FRAC,
    CostModelDraftLength,
    CostModelOptions,
    expected_tokens,
)
from specdec.progress import Row
from specdec.types import Prospect, Request

# A pass over t tokens takes 10 + t, a drafted token 1.
CHEAP = PassCosts(tuple(10.0 + t for t in range(9)), {"": tuple(map(float, range(9)))})
# A drafted token costs nearly a pass.
DEAR = PassCosts(tuple(10.0 + t for t in range(9)), {"": tuple(9.0 * k for k in range(9))})


def row(request_id: int = 0) -> Row:
    return Row(Request(request_id, (1, 2), 500), 0)


def after(policy: CostModelDraftLength, fate: float, steps: int, only: Row | None = None) -> list[int]:
    """Lengths that the policy chose while a share `fate` of each draft stood."""
    chosen = []
    rows = [only or row()]
    for _ in range(steps):
        (limit,) = policy.limits(rows, [Prospect()])
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
        rates = {k: expected_tokens(k, first, following) / CHEAP.step(k) for k in range(1, 9)}
        assert rates[best] == max(rates.values())


def test_what_a_row_has_no_room_for_does_not_count() -> None:
    """Eight tokens would pay for a dear beginning, the one that is left does not."""
    costs = PassCosts(CHEAP.target, {"": (0.0, *(12.0 + k for k in range(8)))})
    policy = CostModelOptions(max=8).build(costs)
    after(policy, 1.0, 30, row(0))
    rooms = {room: Row(Request(1, (1, 2), room), 0) for room in (1, 2, 3, 9, 10)}
    limits = {room: limit_of(policy, only, Prospect()) for room, only in rooms.items()}
    assert limits == {1: 0, 2: 0, 3: 2, 9: 8, 10: 8}


def test_passes_may_seem_to_take_no_time() -> None:
    for costs in (PassCosts((0.0,), {"": (0.0,)}), PassCosts((0.0, 1.0), {"": (0.0, 1.0)})):
        chosen = after(CostModelOptions(max=3).build(costs), 0.0, 20)
        assert set(chosen) <= {0, 1, 2, 3}


def test_all_accepted_drafts_as_much_as_allowed() -> None:
    assert after(CostModelOptions(max=8).build(CHEAP), 1.0, 20)[-1] == 8


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_nothing_accepted_stops_drafting_but_asks_again_as_time_allows(costs: PassCosts) -> None:
    chosen = after(CostModelOptions(max=8).build(costs), 0.0, 600)
    later = chosen[40:]
    lost = sum(costs.step(limit) - costs.plain for limit in later if limit)
    plain = sum(costs.plain for limit in later if not limit)
    assert 0 < lost < (TRIAL_FRAC + 0.005) * plain
    assert set(later) == {0, 1}


def test_drafting_comes_back_when_it_pays_again() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    bad = row()
    assert after(policy, 0.0, 100, bad)[-1] == 0
    assert after(policy, 1.0, 150, bad)[-1] >= 4


def test_where_drafting_costs_as_much_as_decoding_nothing_is_drafted_for_long() -> None:
    chosen = after(CostModelOptions(max=8).build(DEAR), 0.5, 100)
    assert sum(limit > 0 for limit in chosen) < 15


def test_a_new_row_believes_what_all_rows_have_shown() -> None:
    policy = CostModelOptions(max=8).build(DEAR)
    for number in range(3):
        after(policy, 0.0, 40, row(number))
    assert after(policy, 0.0, 10, row(9))[0] == 0


def limit_of(policy: CostModelDraftLength, only: Row, prospect: Prospect) -> int:
    (limit,) = policy.limits([only], [prospect])
    return limit


def test_reading_a_long_text_first_has_to_pay_within_what_is_left_of_the_row() -> None:
    costs = PassCosts(CHEAP.target, CHEAP.draft, unread_token=1.0)
    policy = CostModelOptions(max=8).build(costs)
    after(policy, 1.0, 30, row(0))  # all of 8 stand: 9 tokens in 26 instead of 90
    long, short = (Row(Request(number, (1, 2), limit), 0) for number, limit in ((1, 200), (2, 20)))
    assert limit_of(policy, long, Prospect(unread=300)) == 8
    assert limit_of(policy, short, Prospect(unread=300)) == 0
    assert limit_of(policy, short, Prospect(unread=30)) == 8


def test_kinds_of_proposals_have_costs_and_rates_of_their_own() -> None:
    both = PassCosts(CHEAP.target, {"copy": CHEAP.draft[""], "": DEAR.draft[""]})
    policy = CostModelOptions(max=8).build(both)
    only = row()
    for _ in range(40):
        for kind, fate in (("copy", 1.0), ("", 0.5)):
            limit = limit_of(policy, only, Prospect(kind))
            policy.accept([only], [limit], [round(fate * limit)])
    assert limit_of(policy, only, Prospect("copy")) == 8
    assert limit_of(policy, only, Prospect()) == 0


def test_rows_learn_from_each_other() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    after(policy, 0.0, 60, row(0))
    (limit,) = policy.limits([row(1)], [Prospect()])
    fresh = CostModelOptions(max=8).build(CHEAP)
    assert limit < fresh.limits([row(1)], [Prospect()])[0]


def test_a_row_that_is_gone_is_forgotten() -> None:
    policy = CostModelOptions(max=8).build(CHEAP)
    after(policy, 1.0, 3, row(0))
    policy.limits([row(1)], [Prospect()])
    assert list(policy._rows) == [1]


def test_another_text_with_the_same_id_is_another_row() -> None:
    chosen = []
    for earlier in (0, 1):
        policy = CostModelOptions(max=8).build(CHEAP)
        after(policy, 0.5, 60, row(2))
        after(policy, 1.0, 30, row(earlier))
        chosen.append(after(policy, 0.0, 12, row(0)))
    assert chosen[0] == chosen[1]


def test_rows_too_short_for_a_trial_of_their_own_save_up_for_one() -> None:
    costs = PassCosts(CHEAP.target, {"": tuple(4.0 * k for k in range(9))})
    policy = CostModelOptions(max=8).build(costs)
    after(policy, 0.0, 2000, row(0))
    bad = [limit for number in range(1, 41) for limit in after(policy, 0.0, 15, row(number))]
    lost = sum(costs.step(limit) - costs.plain for limit in bad if limit)
    assert 0 < lost < (TRIAL_FRAC + 0.005) * bad.count(0) * costs.plain
    good = [limit for number in range(41, 141) for limit in after(policy, 1.0, 15, row(number))]
    assert good[-1] == 8


def test_costs_go_on_beyond_their_table() -> None:
    costs = PassCosts((10.0, 12.0), {"": (0.0, 3.0)})
    assert costs.step(1) == 15.0
    assert costs.step(3) == 16.0 + 9.0
    assert PassCosts((10.0,), {"": (1.0,)}).step(5) == 11.0


def test_an_unknown_kind_costs_what_the_dearest_does() -> None:
    costs = PassCosts((10.0, 12.0), {"": (0.0, 3.0), "copy": (1.0, 1.0)})
    assert (costs.step(1, "copy"), costs.step(1), costs.step(1, "other"), costs.step(0, "other")) == (
        13.0,
        15.0,
        15.0,
        11.0,
    )


def test_costs_are_checked_and_needed() -> None:
    with pytest.raises(ValueError, match="target"):
        PassCosts((), {"": (1.0,)})
    with pytest.raises(ValueError, match=r"draft\['copy'\]=\(-1\.0,\)"):
        PassCosts((1.0,), {"copy": (-1.0,)})
    with pytest.raises(ValueError, match="at least one kind"):
        PassCosts((1.0,), {})
    with pytest.raises(ValueError, match=r"unread_token=-1\.0"):
        PassCosts((1.0,), {"": (1.0,)}, -1.0)
    with pytest.raises(ValueError, match="cost_model needs"):
        CostModelOptions().build()


def test_confidence_goes_on_while_the_largest_probability_is_large() -> None:
    policy = ConfidenceOptions(min_prob=0.5).build()
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25], [0.5, 0.25, 0.25]]).log()
    assert policy.go_on(logits, 0) == [True, False, True]
    assert policy.limits([row(), row(1)], [Prospect()] * 2) == [8, 8]


def test_confidence_is_checked() -> None:
    with pytest.raises(ValueError, match=r"min_prob=1\.5"):
        ConfidenceOptions(min_prob=1.5)
