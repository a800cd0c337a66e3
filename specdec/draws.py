"""Keyed randomness: every draw is a pure function of (seed, key), so nothing depends on batch mates or order.

The target's own sample is keyed by (request, position): plain sampling is a function of the seed and the text.
Draft, accept and recovered draws are keyed by (request, block start, offset, purpose). Not by position alone:
a block verifier looks at draws of later positions, and the next block would use them a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from specdec.types import Law


class Purpose(IntEnum):
    """What a draw decides; part of its key."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    RECOVERED = 4


@dataclass(frozen=True)
class Keys:
    """One key per row: `request_ids [B]`, `starts [B]` (position, or block start) and `offsets [B]`, int64."""

    purpose: Purpose
    request_ids: Tensor
    starts: Tensor
    offsets: Tensor


class Draws(Protocol):
    """A source of keyed decisions. The engine uses `KeyedDraws`; a certificate enumerates all outcomes."""

    def accept(self, prob: Tensor, keys: Keys) -> Tensor:
        """Bool `[B]`: true with probability `min(prob, 1)`, float64 `[B]`."""
        ...

    def pick(self, law: Law, keys: Keys) -> Tensor:
        """Token ids `[B]`, one from each law `[B]`."""
        ...


class KeyedDraws:
    """Draws from a counter-based generator: splitmix64's finalizer over the key's parts, 52-bit uniforms."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def accept(self, prob: Tensor, keys: Keys) -> Tensor:
        certain = prob >= 1
        if bool((certain | (prob <= 0)).all()):  # as with greedy laws: no number could decide otherwise
            return certain
        # Strict: a uniform of exactly 0 must not accept a token of probability 0.
        return _uniform(self._hash(keys)) < prob

    def pick(self, law: Law, keys: Keys) -> Tensor:
        """Gumbel-max, written as the race of exponential clocks: `argmin(-log(u_v) / prob_v)`."""
        if law.ids is not None:
            return law.ids
        assert law.probs is not None
        tokens = torch.arange(law.probs.shape[-1], device=law.probs.device)
        uniforms = _uniform(_mix(self._hash(keys).unsqueeze(-1) + (tokens + 1) * _GAMMA))
        return (uniforms.log_().neg_() / law.probs.double()).argmin(-1)

    def _hash(self, keys: Keys) -> Tensor:
        state = _mix(torch.full_like(keys.request_ids, _wrap(self.seed + keys.purpose * _GAMMA)))
        for part in (keys.request_ids, keys.starts, keys.offsets):
            state = _mix(state + (part + 1) * _GAMMA)
        return state


@dataclass(frozen=True)
class BlockDraws:
    """The draws of one step: the rows' requests, and the position of the first token each may commit.

    Offsets count from that position: the draft token at offset 0 may become the text's token at `starts[b]`.
    With `shares_noise` draft tokens are drawn with the noise of the target's own samples; only a verifier that asks for
    it may judge them, since drawn so they depend on what the target would sample.
    """

    draws: Draws
    request_ids: Tensor
    starts: Tensor
    shares_noise: bool = False

    @staticmethod
    def of(
        draws: Draws,
        request_ids: Sequence[int],
        starts: Sequence[int],
        device: torch.device,
        shares_noise: bool = False,
    ) -> BlockDraws:
        ids, places = (torch.tensor(part, device=device) for part in (request_ids, starts))
        return BlockDraws(draws, ids, places, shares_noise)

    def draft(self, law: Law, offset: int) -> Tensor:
        """Draft tokens `[B]` at one offset, drawn from `law [B]`."""
        if self.shares_noise:
            return self.target(law, torch.full_like(self.starts, offset))
        return self.draws.pick(law, self._block_keys(Purpose.DRAFT, offset))

    def accept(self, prob: Tensor, offset: int) -> Tensor:
        """Bool `[B]`: is the draft token at `offset` accepted, with probability `prob [B]`?"""
        return self.draws.accept(prob, self._block_keys(Purpose.ACCEPT, offset))

    def recovered(self, law: Law, offsets: Tensor) -> Tensor:
        """Recovered tokens `[B]`, row b's at `offsets[b]`."""
        return self.draws.pick(law, Keys(Purpose.RECOVERED, self.request_ids, self.starts, offsets))

    def target(self, law: Law, offsets: Tensor) -> Tensor:
        """The target's own tokens `[B]` at `offsets [B]`: keyed by position, as plain sampling draws them."""
        return self.draws.pick(
            law, Keys(Purpose.TARGET, self.request_ids, self.starts + offsets, torch.zeros_like(offsets))
        )

    def _block_keys(self, purpose: Purpose, offset: int) -> Keys:
        return Keys(purpose, self.request_ids, self.starts, torch.full_like(self.starts, offset))


def _wrap(value: int) -> int:
    """An integer as the signed 64-bit number with the same low bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


# Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (splitmix64's constants)
_GAMMA = _wrap(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _wrap(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _wrap(0x94D049BB133111EB)


def _xor_shift(state: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes the shift a logical one
    return state ^ ((state >> bits) & ((1 << (64 - bits)) - 1))


def _mix(state: Tensor) -> Tensor:
    state = _xor_shift(state, 30) * _MULTIPLY_1
    state = _xor_shift(state, 27) * _MULTIPLY_2
    return _xor_shift(state, 31)


def _uniform(state: Tensor) -> Tensor:
    """Float64 in the open interval (0, 1), from the top 52 bits: with 53, adding a half would round up to 1.

    At 1 a certain token would be refused, and a token of probability 0 win the race (its clock would be 0 / 0).
    """
    bits = (state >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) * 2.0**-52
