"""Which of several kernels: each is asked whether it is there and right, then they are timed, once per process.

The price of a kernel on a machine can't be looked up: it depends on the processor, the library's version and the number
of threads. Layers of one shape are multiplied in turn, of as many different weights as no cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

# A token alone, and a pass that verifies four drafted ones.
PASS_ROWS = (1, 5)
ROUNDS = 9
COLD_BYTES = 48 * 2**20
MOST_LAYERS = 64
# A wrong kernel is wrong by the size of the result; rounding of activations to 8 bits is a hundredth of that.
LARGEST_ERROR_FRAC = 0.05
PROBE_SHAPE = (48, 160)
# Kernels round otherwise: a choice that flips with the noise would change results, so near ties go to the first.
CLEARLY_CHEAPER = 0.8


@dataclass(frozen=True)
class Candidate:
    """A kernel by name. `oracle` gives the weights `[N, K]` that the layer of a float layer stands for."""

    name: str
    make: Callable[[nn.Linear], nn.Module]
    oracle: Callable[[nn.Linear], Tensor]


@dataclass(frozen=True)
class Choice:
    """The kernel that was chosen, what each cost in microseconds at `PASS_ROWS`, and why others were out."""

    name: str
    costs_us: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        costs = [f"{name} {'/'.join(f'{cost:.0f}' for cost in us)}" for name, us in self.costs_us.items()]
        out = [f"{name} out: {reason}" for name, reason in self.unfit.items()]
        rows = "/".join(map(str, PASS_ROWS))
        return "; ".join([*([f"at {rows} tokens {', '.join(costs)}"] if costs else []), *out])


_chosen: dict[object, Choice] = {}


def choose(candidates: Sequence[Candidate], shape: tuple[int, int], dtype: torch.dtype) -> Choice:
    """The first candidate that fits, or one whose product of costs at `PASS_ROWS` is clearly less.

    Args:
        shape: outputs and inputs of the layers that are timed.

    Raises ValueError, in one line, where no candidate is right on this machine.
    """
    key = (tuple(candidate.name for candidate in candidates), shape, dtype, torch.get_num_threads())
    if key not in _chosen:
        _chosen[key] = _choose(candidates, shape, dtype)
    return _chosen[key]


def seconds_spent() -> float:
    """What all choices of this process took."""
    return sum(choice.seconds for choice in _chosen.values())


def why_unfit(candidate: Candidate, dtype: torch.dtype) -> str:
    """Why a kernel can't be used here, in one line; empty for one that is there and right."""
    try:
        with torch.no_grad():
            linear = _random_linear(PROBE_SHAPE, dtype)
            layer, weight = candidate.make(linear), candidate.oracle(linear).double()
            for rows in PASS_ROWS:
                inputs = torch.randn(1, rows, PROBE_SHAPE[1], generator=_generator()).to(dtype)
                expected = inputs.double() @ weight.T
                error = (layer(inputs).double() - expected).abs().max() / expected.abs().max()
                if not error <= LARGEST_ERROR_FRAC:
                    return f"its results are wrong by {float(error):.2g} of the largest"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def _choose(candidates: Sequence[Candidate], shape: tuple[int, int], dtype: torch.dtype) -> Choice:
    start_s = time.perf_counter()
    unfit = {candidate.name: why_unfit(candidate, dtype) for candidate in candidates}
    unfit = {name: reason for name, reason in unfit.items() if reason}
    fit = [candidate for candidate in candidates if candidate.name not in unfit]
    if not fit:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unfit.items())
        raise ValueError(f"no kernel of this format works on this machine ({reasons}); use weights=plain")
    costs = _costs_us(fit, shape, dtype) if len(fit) > 1 else {}
    best = fit[0].name
    for name, found in costs.items():
        if prod(found) < CLEARLY_CHEAPER * prod(costs[best]):
            best = name
    return Choice(best, costs, unfit, time.perf_counter() - start_s)


def _costs_us(
    candidates: Sequence[Candidate], shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, list[float]]:
    outputs, inputs = shape
    num_layers = max(1, min(MOST_LAYERS, COLD_BYTES // (outputs * inputs)))
    linear = _random_linear(shape, dtype)
    layers = {one.name: [one.make(linear) for _ in range(num_layers)] for one in candidates}
    costs: dict[str, list[float]] = {name: [] for name in layers}
    with torch.no_grad():
        for rows in PASS_ROWS:
            activations = torch.randn(1, rows, inputs, generator=_generator()).to(dtype)
            times: dict[str, list[float]] = {name: [] for name in layers}
            for _ in range(ROUNDS):
                for name, made in layers.items():
                    start_s = time.perf_counter()
                    for layer in made:
                        layer(activations)
                    times[name].append((time.perf_counter() - start_s) / num_layers)
            for name, found in times.items():
                costs[name].append(1e6 * min(found))  # another process can only add to it
    return costs


def _random_linear(shape: tuple[int, int], dtype: torch.dtype) -> nn.Linear:
    outputs, inputs = shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.randn(outputs, inputs, generator=_generator()) * inputs**-0.5
    linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return linear.eval()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
