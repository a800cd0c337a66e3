"""Quantization as tensor mathematics: codes, scales, minima. Every kernel is tested against these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """Codes of a matrix `[N, K]`, and per group of K its scale and offset `[N, K / group]`: code x scale + offset."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    def dequantized(self) -> Tensor:
        """The matrix `[N, K]` that the codes stand for, in the scales' dtype."""
        rows, groups = self.scales.shape
        grouped = self.codes.reshape(rows, groups, -1).to(self.scales.dtype)
        values = grouped * self.scales.unsqueeze(-1) + self.offsets.unsqueeze(-1)
        return values.reshape(rows, -1)


def quantize_affine(weight: Tensor, bits: int, group: int) -> Quantized:
    """Codes 0 .. 2^bits - 1, from each group's minimum to its maximum: error at most half a step.

    Raises ValueError for a K that `group` does not divide.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"{columns} inputs can't be divided into groups of {group}")
    grouped = weight.float().reshape(rows, columns // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((grouped - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return Quantized(codes.reshape(rows, columns).to(torch.uint8), scales, low)


def quantize_rows(weight: Tensor, dtype: torch.dtype = torch.float32) -> Quantized:
    """Signed 8-bit codes, one scale per row (output channel), no offset: error at most half a step.

    `dtype`: what scales are stored in; they are rounded to it before codes are chosen.
    """
    wide = weight.float()
    scales = _stored(wide.abs().amax(-1, keepdim=True) / 127, dtype)
    codes = (wide / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return Quantized(codes, scales, torch.zeros_like(scales))


def quantize_centred(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float32
) -> Quantized:
    """Signed codes -2^(bits-1) .. 2^(bits-1) - 1, from each group's minimum to its maximum: error at most half a step.

    The offset is the value of code 0, in the middle: a small number for most weights, which keeps its precision in 16
    bits. Where it is large, a step is longer by what its rounding takes. `symmetric`: the offset is 0, so a step is
    larger. `dtype`: as for `quantize_rows`.

    Raises ValueError for a K that `group` does not divide.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"{columns} inputs can't be divided into groups of {group}")
    grouped = weight.float().reshape(rows, columns // group, group)
    half = 2 ** (bits - 1)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if symmetric:
        # The codes have one more place below zero than above.
        scales = _stored(torch.maximum(-low / half, high / (half - 1)), dtype)
        offsets = torch.zeros_like(scales)
    else:
        scales = _stored((high - low) / (2 * half - 1), dtype)
        offsets = (low + half * scales.float()).to(dtype)
        # Far from 0 an offset may be rounded by more than half a step: steps then reach the end that it moved from.
        below, above = offsets.float() - low, high - offsets.float()
        needed = torch.maximum(below / (half + 0.5), above / (half - 0.5))
        scales = torch.maximum(scales, (needed * (1 + torch.finfo(dtype).eps)).to(dtype))
    steps = (grouped - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    codes = steps.round().clamp(-half, half - 1).to(torch.int8)
    return Quantized(codes.reshape(rows, columns), scales, offsets)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to what they are stored in, and never 0."""
    return scales.clamp_min(torch.finfo(torch.float32).tiny).to(dtype).clamp_min(torch.finfo(dtype).tiny)


@dataclass(frozen=True)
class Packed:
    """Codes in whole bytes, 8 / bits of them each: the first ones of the last dimension lie in the low bits.

    Code x scale + low, or code x scale with signed codes of 8 bits, which need no `lows`. Scales and lows have size 1
    where a group was reduced.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None


def pack_groups(values: Tensor, bits: int, dim: int, stored: torch.dtype) -> Packed:
    """Quantize groups that lie along dimension `dim`; scales and lows are kept as `stored`, a 16-bit float.

    8 bits are symmetric, fewer go from a group's minimum to its maximum. Codes are taken from the scales and lows as
    stored, so their rounding adds nothing: the error is half a step at most, the step being the stored scale.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    limits = torch.finfo(stored)
    if bits == 8:
        scales = (wide.abs().amax(dim, keepdim=True) / 127).clamp_min_(limits.tiny).to(stored)
        return Packed((wide / scales).round_().clamp_(-127, 127).to(torch.int8), scales, None)
    levels = 2**bits - 1
    minima = wide.amin(dim, keepdim=True)
    # Rounded downwards: what lies below the lowest code would be off by more than half a step.
    lows = (minima - minima.abs() * (limits.eps / 2)).clamp_min_(limits.min).to(stored)
    scales = ((wide.amax(dim, keepdim=True) - lows) / levels).clamp_min_(limits.tiny).to(stored)
    codes = ((wide - lows) / scales).round_().clamp_(0, levels).to(torch.uint8)
    return Packed(pack(codes, bits), scales, lows)


def unpack_groups(packed: Packed, bits: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """What the codes stand for, in `dtype`; into `out`, where given."""
    codes, scales = unpack(packed.codes, bits), packed.scales.to(dtype)
    if packed.lows is None:
        return torch.mul(codes, scales, out=out)
    return torch.add(codes.to(dtype).mul_(scales), packed.lows.to(dtype), out=out)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes 0 .. 2^bits - 1 `[..., N]` in bytes `[..., N * bits / 8]`; N must fill whole bytes."""
    packed, *others = codes.chunk(8 // bits, -1)
    for number, part in enumerate(others, 1):
        packed = packed | (part << bits * number)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`; bytes of 8-bit codes are these codes."""
    if bits == 8:
        return packed
    shifted = [packed, *(packed >> shift for shift in range(bits, 8, bits))]
    # The highest codes have nothing above them.
    return torch.cat([*(part & 2**bits - 1 for part in shifted[:-1]), shifted[-1]], -1)
