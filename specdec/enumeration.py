"""Every outcome of a random computation, with its exact probability.

The computation is run once per outcome. Each key stands for one uniform number; a run knows the interval that its
earlier answers have left for it, and a query splits that interval. So two queries of one key are as dependent as
they are in a real run that uses one number twice: key reuse shows as a wrong law instead of being averaged away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from specdec.draws import Draws, Keys
from specdec.types import Law

Result = TypeVar("Result", bound=Hashable)
Interval = tuple[float, float]


class EnumeratingDraws:
    """Draws that follow one path: at each query the path's next branch; behind the path's end, the first branch.

    A uniform number decides as follows: `accept` when it is below the probability, `pick` by the inverse of the
    cumulative law. Branches of probability 0 do not exist. Probabilities that are not numbers accept nothing.
    """

    def __init__(self, path: Sequence[int] = ()) -> None:
        self._path = path
        self._left: defaultdict[Hashable, Interval] = defaultdict(lambda: (0.0, 1.0))
        self.taken: list[int] = []
        self.num_branches: list[int] = []
        self.probability = 1.0

    def accept(self, prob: Tensor, keys: Keys) -> Tensor:
        answers = []
        for key, threshold in zip(_names(keys), prob.tolist(), strict=True):
            threshold = min(threshold, 1.0) if threshold > 0 else 0.0
            answers.append(self._query(key, [0.0, threshold, 1.0]) == 0)
        return torch.tensor(answers, device=prob.device)

    def pick(self, law: Law, keys: Keys) -> Tensor:
        if law.ids is not None:
            return law.ids
        assert law.probs is not None
        answers = []
        for key, probs in zip(_names(keys), law.probs.double().tolist(), strict=True):
            bounds = list(accumulate(probs, initial=0.0))
            answers.append(self._query(key, [bound / bounds[-1] for bound in bounds]))
        return torch.tensor(answers, device=law.probs.device)

    def _query(self, key: Hashable, bounds: Sequence[float]) -> int:
        """Which of the cells between `bounds` holds the key's number; takes a branch where several may."""
        low, high = self._left[key]
        cells = [(max(low, left), min(high, right)) for left, right in pairwise(bounds)]
        possible = [index for index, (left, right) in enumerate(cells) if left < right]
        branch = 0
        if len(possible) > 1:
            step = len(self.taken)
            branch = self._path[step] if step < len(self._path) else 0
            self.taken.append(branch)
            self.num_branches.append(len(possible))
        chosen = possible[branch]
        left, right = self._left[key] = cells[chosen]
        self.probability *= (right - left) / (high - low)
        return chosen


def _names(keys: Keys) -> list[Hashable]:
    parts = (keys.request_ids, keys.starts, keys.offsets)
    return [(keys.purpose, *name) for name in zip(*(part.tolist() for part in parts), strict=True)]


def outcomes(run: Callable[[Draws], Result]) -> Iterator[tuple[Result, float]]:
    """All results of `run(draws)` with their probabilities; a result may come more than once.

    `run` must be a function of its draws alone. Depth first: the last branch that has a successor moves on.
    """
    path: list[int] | None = []
    while path is not None:
        draws = EnumeratingDraws(path)
        result = run(draws)
        yield result, draws.probability
        path = _next_path(draws.taken, draws.num_branches)


def _next_path(taken: Sequence[int], num_branches: Sequence[int]) -> list[int] | None:
    for step in reversed(range(len(taken))):
        if taken[step] + 1 < num_branches[step]:
            return [*taken[:step], taken[step] + 1]
    return None


def law_of(run: Callable[[Draws], Result]) -> dict[Result, float]:
    """The exact law of the result of `run`."""
    law: defaultdict[Result, float] = defaultdict(float)
    for result, probability in outcomes(run):
        law[result] += probability
    return dict(law)


def total_variation(left: dict[Result, float], right: dict[Result, float]) -> float:
    return sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys()) / 2
