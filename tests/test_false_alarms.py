"""Comparisons of recorded times: how often an arm beside itself gets a verdict, and a slower one does not."""

from __future__ import annotations

import pytest

from experiments.benchmarks.false_alarms import alarms_frac, load, simulate
from experiments.statistics import SLOWER


def test_the_recording_has_twelve_prompts_beside_themselves() -> None:
    recording = load()
    assert len(recording.repeats_of) == 12
    assert {len(repeats) for repeats in recording.repeats_of.values()} == {10}
    for ours, theirs in recording.pairs.values():
        assert len(ours) == len(theirs) >= 8  # the same greedy text
        assert min(*ours, *theirs) > 0


def test_a_few_comparisons_of_an_arm_with_itself_give_few_verdicts() -> None:
    """At a rate of 7 % one seed in 1000 gives more than 17 of 120."""
    assert simulate(load(), 120).total() == 120
    assert alarms_frac(simulate(load(), 120)) <= 17 / 120


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("repeats", [1, 2])
def test_two_thousand_comparisons_of_an_arm_with_itself_alarm_in_3_to_7_of_100(repeats: int) -> None:
    assert 0.03 <= alarms_frac(simulate(load(), 2000, repeats=repeats)) <= 0.07


@pytest.mark.slow
@pytest.mark.sample
def test_a_slowdown_of_5_in_100_is_seen_with_default_settings() -> None:
    """96 % of 2000 comparisons saw it."""
    verdicts = simulate(load(), 1000, slowdown_frac=0.05)
    assert verdicts[SLOWER] / verdicts.total() >= 0.9
