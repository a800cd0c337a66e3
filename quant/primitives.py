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


def quantize_rows(weight: Tensor) -> Quantized:
    """Signed 8-bit codes, one scale per row (output channel), no offset: error at most half a step."""
    wide = weight.float()
    scales = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (wide / scales).round().clamp(-127, 127).to(torch.int8)
    return Quantized(codes, scales, torch.zeros_like(scales))
