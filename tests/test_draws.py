"""Keyed draws: functions of (seed, key) and nothing else, uniform, and strict at the ends.

Statistical tests run on fixed seeds; their bounds are such that another seed would raise a false alarm with a
probability of about 1e-6.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare, kstest, pearsonr
from torch import Tensor
from toy_engine import CPU

from specdec.draws import BlockDraws, KeyedDraws, Keys, Purpose, _uniform
from specdec.types import Law

pytestmark = pytest.mark.usefixtures("one_thread")

FALSE_ALARM = 1e-6
SEEDS = [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**30, -(10**30)]


def keys(requests: Tensor | int, starts: Tensor | int, offsets: Tensor | int, purpose: Purpose) -> Keys:
    parts = torch.broadcast_tensors(
        *(torch.as_tensor(part).reshape(-1) for part in (requests, starts, offsets))
    )
    return Keys(purpose, *parts)


def uniforms(draws: KeyedDraws, at: Keys) -> Tensor:
    """The numbers behind `accept`, as it uses them."""
    return _uniform(draws._hash(at))


COUNT = torch.arange(50_000)
VARIATIONS = {
    "requests": lambda: keys(COUNT, 7, 0, Purpose.ACCEPT),
    "starts": lambda: keys(3, COUNT, 0, Purpose.ACCEPT),
    "offsets": lambda: keys(3, 7, COUNT, Purpose.ACCEPT),
    "blocks_of_a_text": lambda: keys(0, COUNT // 5 * 5, COUNT % 5, Purpose.DRAFT),
}


@pytest.mark.parametrize("varied", sorted(VARIATIONS))
@pytest.mark.parametrize("seed", [0, 1, -5, 10**30])
def test_uniform(seed: int, varied: str) -> None:
    numbers = uniforms(KeyedDraws(seed), VARIATIONS[varied]())
    assert numbers.dtype == torch.float64
    assert numbers.unique().numel() == COUNT.numel()
    assert kstest(numbers.numpy(), "uniform").pvalue > FALSE_ALARM
    # the low half of the bits as well
    assert kstest(((numbers * 2**24) % 1).numpy(), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("varied", sorted(VARIATIONS))
def test_neighbours_are_not_correlated(varied: str) -> None:
    numbers = uniforms(KeyedDraws(0), VARIATIONS[varied]()).numpy()
    for lag in (1, 2, 5):
        assert pearsonr(numbers[:-lag], numbers[lag:]).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_independent(left: Purpose, right: Purpose) -> None:
    draws = KeyedDraws(0)
    pair = [uniforms(draws, keys(3, COUNT, 0, purpose)).numpy() for purpose in (left, right)]
    assert pearsonr(*pair).pvalue > FALSE_ALARM


def test_neighbouring_seeds_are_independent() -> None:
    pair = [uniforms(KeyedDraws(seed), keys(3, COUNT, 0, Purpose.ACCEPT)).numpy() for seed in (0, 1)]
    assert pearsonr(*pair).pvalue > FALSE_ALARM


def test_no_two_keys_share_a_number() -> None:
    """Purpose, request, start and offset all count, and none stands for another."""
    draws = KeyedDraws(0)
    small = torch.arange(12)
    grid = torch.cartesian_prod(small, small, small)
    numbers = torch.cat([uniforms(draws, Keys(purpose, *grid.unbind(1))) for purpose in Purpose])
    assert numbers.unique().numel() == numbers.numel()


def test_a_draw_does_not_depend_on_batch_mates_or_their_order() -> None:
    draws = KeyedDraws(5)
    requests, starts, offsets = torch.tensor([4, 9, 2]), torch.tensor([10, 3, 10]), torch.tensor([0, 1, 2])
    laws = torch.softmax(torch.randn(3, 20, generator=torch.Generator().manual_seed(0)), -1)
    together = draws.pick(Law(probs=laws), Keys(Purpose.DRAFT, requests, starts, offsets))
    accepted = draws.accept(laws[:, 0].double() * 10, Keys(Purpose.ACCEPT, requests, starts, offsets))
    for order in itertools.permutations(range(3)):
        for size in (1, 2, 3):
            some = list(order[:size])
            parts = requests[some], starts[some], offsets[some]
            assert torch.equal(draws.pick(Law(probs=laws[some]), Keys(Purpose.DRAFT, *parts)), together[some])
            again = draws.accept(laws[some, 0].double() * 10, Keys(Purpose.ACCEPT, *parts))
            assert torch.equal(again, accepted[some])


def test_no_global_state() -> None:
    at = keys(COUNT[:100], 0, 0, Purpose.TARGET)
    law = Law(probs=torch.full((100, 7), 1 / 7))
    before = torch.random.get_rng_state()
    first = KeyedDraws(3).pick(law, at)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(KeyedDraws(3).pick(law, at), first)
    torch.random.set_rng_state(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_integer_is_a_seed(seed: int) -> None:
    at = keys(COUNT[:2000], 0, 0, Purpose.TARGET)
    picked = KeyedDraws(seed).pick(Law(probs=torch.full((2000, 4), 0.25)), at)
    assert chisquare(picked.bincount(minlength=4).numpy()).pvalue > FALSE_ALARM


def test_seeds_differ() -> None:
    """All but those that agree in their low 64 bits."""
    numbers = {seed: uniforms(KeyedDraws(seed), keys(0, 0, 0, Purpose.TARGET)).item() for seed in SEEDS}
    assert len(set(numbers.values())) == len({seed % 2**64 for seed in SEEDS})


def test_accept_is_strict() -> None:
    draws = KeyedDraws(0)
    at = keys(COUNT, 0, 0, Purpose.ACCEPT)
    for never in (0.0, -1.0, -torch.inf, torch.nan):
        assert not draws.accept(torch.full((len(COUNT),), never).double(), at).any()
    for always in (1.0, 1.5, torch.inf):
        assert draws.accept(torch.full((len(COUNT),), always).double(), at).all()


@pytest.mark.parametrize("number", [0.0, 0.25])
def test_accept_is_strict_at_equality(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a generator that could return 0 would not accept a token of probability 0."""
    monkeypatch.setattr("specdec.draws._uniform", lambda state: torch.full(state.shape, number).double())
    at = keys(COUNT[:3], 0, 0, Purpose.ACCEPT)
    probs = torch.tensor([number, number + 1e-12, 0.0], dtype=torch.float64)
    assert KeyedDraws(0).accept(probs, at).tolist() == [False, True, False]


@pytest.mark.parametrize("state", [0, -1, 2**63 - 1, -(2**63), 1, -2, -(2**11), (1 << 11) - 1])
def test_uniforms_never_reach_the_ends(state: int) -> None:
    """Every state of the generator is some key's. At 1 a certain token would be refused, and 0/0 picked."""
    number = _uniform(torch.tensor([state])).item()
    assert 0.0 < number < 1.0


@pytest.mark.parametrize("prob", [0.001, 0.3, 0.97])
def test_accept_has_its_probability(prob: float) -> None:
    at = keys(COUNT, 0, 0, Purpose.ACCEPT)
    accepted = KeyedDraws(0).accept(torch.full((len(COUNT),), prob).double(), at).sum().item()
    expected = [prob * len(COUNT), (1 - prob) * len(COUNT)]
    assert chisquare([accepted, len(COUNT) - accepted], expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "probs", [[0.5, 0.5], [0.7, 0.1, 0.15, 0.05], [0.001, 0.999], [0.0, 0.25, 0.0, 0.75], [1 / 64] * 64]
)
def test_pick_has_its_law(probs: list[float], dtype: torch.dtype) -> None:
    law = Law(probs=torch.tensor(probs, dtype=dtype).expand(len(COUNT), -1))
    counts = KeyedDraws(0).pick(law, keys(COUNT, 0, 0, Purpose.TARGET)).bincount(minlength=len(probs))
    possible = [token for token, prob in enumerate(probs) if prob > 0]
    assert counts.sum() == counts[possible].sum() == len(COUNT)  # a token of probability 0 never comes
    expected = [probs[token] * len(COUNT) for token in possible]
    assert chisquare(counts[possible].numpy(), expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (keys(COUNT, 7, 0, Purpose.TARGET), keys(COUNT, 8, 0, Purpose.TARGET)),  # neighbouring positions
        (keys(0, COUNT, 0, Purpose.TARGET), keys(1, COUNT, 0, Purpose.TARGET)),  # neighbouring requests
        (keys(COUNT, 7, 0, Purpose.DRAFT), keys(COUNT, 7, 0, Purpose.TARGET)),
        (keys(COUNT, 7, 0, Purpose.DRAFT), keys(COUNT, 7, 0, Purpose.RECOVERED)),
        (
            keys(COUNT, 7, 1, Purpose.DRAFT),
            keys(COUNT, 8, 0, Purpose.DRAFT),
        ),  # the same position in two blocks
    ],
)
def test_two_keys_pick_independently(left: Keys, right: Keys) -> None:
    probs = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    law = Law(probs=probs.expand(len(COUNT), -1))
    pairs = KeyedDraws(0).pick(law, left) * 3 + KeyedDraws(0).pick(law, right)
    expected = torch.outer(probs, probs).flatten() * len(COUNT)
    assert chisquare(pairs.bincount(minlength=9).numpy(), expected.numpy()).pvalue > FALSE_ALARM


def test_pick_of_a_certain_token() -> None:
    at = keys(COUNT[:100], 0, 0, Purpose.TARGET)
    certain = torch.zeros(100, 9)
    certain[:, 4] = 1.0
    assert (KeyedDraws(0).pick(Law(probs=certain), at) == 4).all()
    ids = COUNT[:100] + 3
    assert torch.equal(KeyedDraws(0).pick(Law(ids=ids), at), ids)


def test_a_token_too_unlikely_for_float32_is_never_picked_by_accident() -> None:
    law = Law(probs=torch.tensor([5e-324, 1.0, 1e-300]).double().expand(len(COUNT), -1))
    assert (KeyedDraws(0).pick(law, keys(COUNT, 0, 0, Purpose.TARGET)) == 1).all()


def test_similar_laws_get_the_same_token_from_the_same_key() -> None:
    """Gumbel-max couples laws: laws at total variation d agree but for about 2d of the keys."""
    at = keys(COUNT, 0, 0, Purpose.TARGET)
    picked = [
        KeyedDraws(0).pick(Law(probs=torch.tensor(probs).expand(len(COUNT), -1)), at)
        for probs in ([0.50, 0.30, 0.20], [0.49, 0.30, 0.21])
    ]
    assert (picked[0] != picked[1]).double().mean() < 0.03


def test_block_keys() -> None:
    """The target's own draws are keyed by position, whatever the block; all others by block and offset."""

    class Recorder(KeyedDraws):
        def pick(self, law: Law, keys: Keys) -> Tensor:
            seen.append(
                (keys.purpose, *(part.tolist()[0] for part in (keys.request_ids, keys.starts, keys.offsets)))
            )
            return torch.zeros(1, dtype=torch.long)

        def accept(self, prob: Tensor, keys: Keys) -> Tensor:
            self.pick(Law(ids=prob), keys)
            return torch.ones(1, dtype=torch.bool)

    seen: list[tuple[int, ...]] = []
    law = Law(probs=torch.ones(1, 1))
    for start, offset in ((10, 2), (11, 1), (12, 0)):
        block = BlockDraws.of(Recorder(0), [6], [start], CPU)
        block.target(law, torch.tensor([offset]))
        block.draft(law, offset)
        block.accept(torch.ones(1), offset)
        block.recovered(law, torch.tensor([offset]))
    assert seen[0::4] == [(Purpose.TARGET, 6, 12, 0)] * 3
    assert seen[1::4] == [(Purpose.DRAFT, 6, 10, 2), (Purpose.DRAFT, 6, 11, 1), (Purpose.DRAFT, 6, 12, 0)]
    assert len(set(seen)) == 1 + 9
