"""Distances of laws: worked out on paper, and what must hold of any two laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.fidelity import Fidelity, LawDistances, log_probs

# Powers of two: logarithms are whole numbers of bits.
BITS = math.log(2)
REFERENCE = [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
STRATEGY = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]
NEXT_IDS = [0, 0, 2, 1]


def distances(reference: list[list[float]], strategy: list[list[float]], next_ids: list[int]) -> LawDistances:
    """Of laws written out; logits are their logarithms and a constant."""
    (found,) = LawDistances.of_logits(
        torch.tensor(reference, dtype=torch.float64).log() + 3,
        [torch.tensor(strategy, dtype=torch.float64).log() - 5],
        torch.tensor(next_ids),
    )
    return found


def test_the_numbers_of_each_position_are_those_on_paper() -> None:
    found = distances(REFERENCE, STRATEGY, NEXT_IDS)
    # Position 0: 1/2 log(2) + 1/4 log(1/2) = 1/4 bit; position 2: the same of the last two tokens.
    torch.testing.assert_close(found.kl_nats, torch.tensor([0.25, 0, 0.25, 0]).double() * BITS)
    torch.testing.assert_close(found.overlap, torch.tensor([0.75, 1, 0.75, 1]).double())
    assert found.is_same_top.tolist() == [False, True, False, True]
    assert found.is_right.tolist() == [False, True, True, False]
    assert found.reference_is_right.tolist() == [True, True, False, False]
    torch.testing.assert_close(found.surprise_nats, torch.tensor([2, 1, 1, 2]).double() * BITS)
    torch.testing.assert_close(found.reference_surprise_nats, torch.tensor([1, 1, 2, 2]).double() * BITS)


def test_the_numbers_of_a_text_are_those_on_paper() -> None:
    found = Fidelity.of(distances(REFERENCE, STRATEGY, NEXT_IDS))
    assert found.num_positions == 4
    assert found.kl_mean == pytest.approx(BITS / 8)
    assert found.kl_median == pytest.approx(BITS / 8)  # halfway from 0 to 1/4
    assert found.kl_max == pytest.approx(BITS / 4)
    assert found.top1_agreement_pct == 50
    assert found.flips_n == 2  # one lost, one gained: they cancel in the share that is right
    assert found.ppl_ratio == pytest.approx(1)
    assert found.expected_acceptance == pytest.approx(0.875)


def test_two_that_are_wrong_in_other_ways_are_no_flip() -> None:
    found = Fidelity.of(distances([[0.5, 0.25, 0.25]], [[0.25, 0.5, 0.25]], [2]))
    assert (found.top1_agreement_pct, found.flips_n) == (0, 0)


def test_a_text_that_the_strategy_finds_likelier_has_a_smaller_perplexity() -> None:
    found = Fidelity.of(distances(REFERENCE[:1] * 2, STRATEGY[:1] * 2, [1, 2]))
    # One token is twice as likely, the other as likely as before: exp of half a bit less.
    assert found.ppl_ratio == pytest.approx(math.sqrt(0.5))


def test_kl_is_of_the_reference_to_the_strategy() -> None:
    forth = distances([[0.5, 0.5]], [[0.25, 0.75]], [0]).kl_nats.item()
    back = distances([[0.25, 0.75]], [[0.5, 0.5]], [0]).kl_nats.item()
    assert forth == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert back == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_what_the_reference_excludes_costs_nothing_and_what_the_strategy_excludes_everything() -> None:
    assert distances([[1, 0, 0]], [[0.5, 0.5, 0]], [0]).kl_nats.item() == pytest.approx(math.log(2))
    missing = Fidelity.of(distances([[0.5, 0.5]], [[1, 0]], [1]))
    assert missing.kl_mean == missing.ppl_ratio == math.inf
    assert set(missing.metrics()) & {"quality/kl_mean", "quality/kl_max", "quality/ppl_ratio"} == set()
    assert missing.metrics()["quality/expected_acceptance"] == 0.5


def test_a_model_that_gives_no_numbers_is_not_a_faithful_one() -> None:
    broken = Fidelity.of(distances([[0.5, 0.5]], [[math.nan, 0.5]], [0]))
    assert "quality/kl_mean" not in broken.metrics()
    assert "quality/expected_acceptance" not in broken.metrics()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_law_beside_itself_is_no_distance_at_all(dtype: torch.dtype) -> None:
    logits = (10 * torch.randn(7, 501, generator=torch.Generator().manual_seed(0))).to(dtype)
    (found,) = LawDistances.of_logits(logits, [logits.clone()], torch.arange(7))
    assert found.kl_nats.tolist() == [0.0] * 7
    torch.testing.assert_close(found.overlap, torch.ones(7).double(), rtol=0, atol=1e-12)
    assert found.is_same_top.all()
    text = Fidelity.of(found)
    assert (text.ppl_ratio, text.flips_n, text.top1_agreement_pct) == (1.0, 0, 100.0)


def random_logits(seed: int, scale: float) -> Tensor:
    return scale * torch.randn(3, 40, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.01, 30), st.floats(-50, 50))
def test_what_holds_of_any_two_laws(seed: int, other: int, scale: float, shift: float) -> None:
    ours, theirs = random_logits(seed, scale), random_logits(other, scale)
    next_ids = torch.tensor([0, 1, 2])
    (found,) = LawDistances.of_logits(ours, [theirs], next_ids)
    assert (found.kl_nats >= 0).all()
    laws = [torch.softmax(logits.double(), -1) for logits in (ours, theirs)]
    variation = 0.5 * (laws[0] - laws[1]).abs().sum(-1)
    torch.testing.assert_close(found.overlap, 1 - variation, rtol=0, atol=1e-12)
    # Pinsker: 2 TV^2 <= KL.
    assert (2 * variation**2 <= found.kl_nats + 1e-12).all()
    # The summed minimum does not care which is which; neither does anything care for a constant in the logits.
    (back,) = LawDistances.of_logits(theirs, [ours], next_ids)
    torch.testing.assert_close(back.overlap, found.overlap)
    (moved,) = LawDistances.of_logits(ours.double() + shift, [theirs.double() - shift], next_ids)
    torch.testing.assert_close(moved.kl_nats, found.kl_nats, rtol=1e-6, atol=1e-9)
    there, here = Fidelity.of(found), Fidelity.of(back)
    assert there.ppl_ratio * here.ppl_ratio == pytest.approx(1)
    assert there.flips_n == here.flips_n


def test_logits_in_16_bits_are_not_summed_in_them() -> None:
    logits = torch.zeros(1, 3000, dtype=torch.bfloat16)
    assert log_probs(logits).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_several_strategies_beside_one_reference_are_as_each_alone() -> None:
    reference, *ours = (random_logits(seed, 2.0) for seed in range(4))
    next_ids = torch.tensor([3, 1, 4])
    for alone, together in zip(ours, LawDistances.of_logits(reference, ours, next_ids), strict=True):
        whole = LawDistances.between(log_probs(reference), log_probs(alone), next_ids)
        for name in LawDistances.__annotations__:
            torch.testing.assert_close(getattr(together, name), getattr(whole, name))


@pytest.mark.parametrize(("number", "has_p99"), [(99, False), (100, True)])
def test_below_a_hundred_positions_there_is_no_99th_percentile(number: int, has_p99: bool) -> None:
    logits = torch.randn(number, 5, generator=torch.Generator().manual_seed(number))
    (found,) = LawDistances.of_logits(logits, [logits.roll(1, 1)], torch.zeros(number, dtype=torch.long))
    metrics = Fidelity.of(found).metrics("floor_")
    assert ("quality/floor_kl_p99" in metrics) == has_p99
    assert metrics["quality/floor_kl_max"] == found.kl_nats.max().item()
    assert metrics["quality/floor_kl_n"] == number
    if has_p99:
        ordered = found.kl_nats.sort().values
        assert ordered[97] <= metrics["quality/floor_kl_p99"] <= ordered[99]


def test_metrics_have_their_contract_names() -> None:
    assert set(Fidelity.of(distances(REFERENCE, STRATEGY, NEXT_IDS)).metrics("corpus_")) == {
        f"quality/corpus_{name}"
        for name in (
            *("kl_mean", "kl_median", "kl_max", "kl_n"),
            *("top1_agreement_pct", "flips_n", "ppl_ratio", "expected_acceptance"),
        )
    }


def test_no_position_is_no_figure() -> None:
    with pytest.raises(ValueError, match="no position"):
        Fidelity.of(distances(REFERENCE[:1], STRATEGY[:1], [0]).joined([empty()]))


def empty() -> LawDistances:
    none = torch.zeros(0, dtype=torch.float64)
    return LawDistances(none, none, none.bool(), none.bool(), none.bool(), none, none)
