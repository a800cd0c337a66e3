"""Quantization as mathematics: codes in range, round trips, and errors of half a step at most."""

from __future__ import annotations

import pytest
import torch

from quant.primitives import Quantized, quantize_affine, quantize_rows

# Beside half a step: float32 rounds code x scale + offset a few times.
ROUNDING = 1e-5


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_off_by_half_a_step_at_most(bits: int, group: int, dtype: torch.dtype) -> None:
    weight = random_matrix(6, 64).to(dtype)
    found = quantize_affine(weight, bits, group)
    assert (found.codes.dtype, found.codes.shape) == (torch.uint8, weight.shape)
    assert found.scales.shape == found.offsets.shape == (6, 64 // group)
    assert int(found.codes.max()) <= 2**bits - 1
    grouped = weight.float().reshape(6, -1, group)
    step = (grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)
    error = (found.dequantized() - weight.float()).reshape(grouped.shape).abs().amax(-1)
    assert bool((error <= step / 2 + ROUNDING).all())
    if group > 1 and bits < 8:
        assert bool((error > step / 8).all())  # it is really so coarse


def test_the_ends_of_a_group_are_exact() -> None:
    found = quantize_affine(torch.tensor([[-1.0, 0.0, 0.5, 2.0, 8.0, 8.0, 9.0, 11.0]]), 2, 4)
    assert found.codes.tolist() == [[0, 1, 2, 3, 0, 0, 1, 3]]
    assert (found.scales.tolist(), found.offsets.tolist()) == ([[1.0, 1.0]], [[-1.0, 8.0]])
    assert found.dequantized().tolist() == [[-1.0, 0.0, 1.0, 2.0, 8.0, 8.0, 9.0, 11.0]]


@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_a_constant_group_is_exact(value: float) -> None:
    weight = torch.full((2, 8), value)
    assert torch.equal(quantize_affine(weight, 4, 4).dequantized(), weight)


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="10 inputs can't be divided into groups of 4"):
        quantize_affine(random_matrix(2, 10), 4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_8_bits_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = random_matrix(6, 50).to(dtype) * torch.logspace(-3, 3, 6).unsqueeze(1).to(dtype)
    found = quantize_rows(weight)
    assert (found.codes.dtype, found.scales.shape) == (torch.int8, (6, 1))
    step = weight.float().abs().amax(-1, keepdim=True) / 127
    error = (found.dequantized() - weight.float()).abs()
    assert bool((error <= step * (0.5 + ROUNDING)).all())
    assert found.codes.abs().amax(-1).tolist() == [127] * 6
    assert torch.equal(quantize_rows(-weight).codes, -found.codes)  # symmetric


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -0.5]])
    found = quantize_rows(weight)
    assert found.codes.tolist() == [[0, 0], [127, -64]]
    assert found.dequantized()[0].tolist() == [0.0, 0.0]


def test_what_codes_stand_for() -> None:
    codes = torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8)
    found = Quantized(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -4.0]]))
    assert found.dequantized().tolist() == [[1.0, 1.5, 0.0, 2.0]]
