"""Quantization as mathematics: codes in range, round trips, and errors of half a step at most."""

from __future__ import annotations

import pytest
import torch

from quant.primitives import (
    Quantized,
    pack,
    pack_groups,
    quantize_affine,
    quantize_centred,
    quantize_rows,
    unpack,
    unpack_groups,
)

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


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 3.0, -40.0])
def test_codes_around_a_middle_are_off_by_half_a_step_at_most(
    bits: int, symmetric: bool, dtype: torch.dtype, shift: float
) -> None:  # Q12
    """Of the step as stored, wherever the numbers lie: 16 bits hold a middle far from 0 only roughly."""
    weight = random_matrix(64, 64) + shift
    found = quantize_centred(weight, bits, 32, symmetric=symmetric, dtype=dtype)
    assert found.scales.dtype == found.offsets.dtype == dtype
    wide = Quantized(found.codes, found.scales.double(), found.offsets.double())
    error = (wide.dequantized() - weight.double()).abs().reshape(64, 2, 32).amax(-1)
    assert bool((error <= wide.scales * (0.5 + ROUNDING * 2**bits)).all())
    assert bool((found.offsets == 0).all()) is symmetric
    if shift == 0:
        assert (int(found.codes.min()), int(found.codes.max())) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    # Covering the ends costs no more of the range than the middle is off.
    grouped = weight.reshape(64, 2, 32)
    low, high = grouped.amin(-1), grouped.amax(-1)
    half, eps = 2 ** (bits - 1), torch.finfo(dtype).eps
    steps = torch.maximum(-low / half, high / (half - 1)) if symmetric else (high - low) / (2 * half - 1)
    most = (steps + wide.offsets.abs() * eps / (half - 0.5)) * (1 + 2 * eps)
    assert bool((wide.scales <= most).all())


def test_groups_that_do_not_divide_the_inputs_have_no_middle_either() -> None:
    with pytest.raises(ValueError, match="10 inputs can't be divided into groups of 4"):
        quantize_centred(random_matrix(2, 10), 4, 4)


def test_scales_are_rounded_before_codes_are_chosen() -> None:
    weight = random_matrix(6, 50)
    found = quantize_rows(weight, torch.bfloat16)
    assert found.scales.dtype == torch.bfloat16
    wide = Quantized(found.codes, found.scales.double(), found.offsets.double())
    error = (wide.dequantized() - weight.double()).abs()
    assert bool((error <= wide.scales * (0.5 + ROUNDING)).all())


@pytest.mark.parametrize("bits", [2, 4])
def test_packed_codes_fill_whole_bytes_and_come_back(bits: int) -> None:
    codes = torch.randint(2**bits, (3, 5, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack(codes, bits)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 5, 16 * bits // 8))
    assert torch.equal(unpack(packed, bits), codes)


def test_packed_bytes_by_hand() -> None:
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack(torch.tensor([1, 2, 15, 4], dtype=torch.uint8), 4).tolist() == [0xF1, 0x42]
    assert unpack(torch.tensor([0b00_11_10_01], dtype=torch.uint8), 2).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [-1, -2, 1])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, 3.0, -40.0])
def test_q12_packed_groups_use_the_whole_range(
    bits: int, dim: int, stored: torch.dtype, shift: float
) -> None:
    """Errors of half a step of the scale as stored, wherever the numbers lie; both ends of the codes are used."""
    values = torch.randn(4, 6, 12, 8, generator=torch.Generator().manual_seed(1)).double() + shift
    found = pack_groups(values, bits, dim, stored)
    assert found.scales.dtype == stored
    assert found.scales.shape == values.amax(dim, keepdim=True).shape
    error = (unpack_groups(found, bits, torch.float64) - values).abs()
    assert bool((error <= found.scales.double() * (0.5 + ROUNDING)).all())
    codes = unpack(found.codes, bits).int()
    if bits == 8:
        assert bool((codes.abs().amax(dim) == 127).all())
        assert found.lows is None
    else:
        assert int(codes.max()) == 2**bits - 1
        assert int(codes.min()) == 0
        assert found.lows is not None
        assert found.lows.dtype == stored
        # A minimum far from 0 is rounded downwards in 16 bits, which costs no more of the range than this.
        low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
        widest = (high - low + low.abs() * torch.finfo(stored).eps) / (2**bits - 1)
        assert bool((found.scales.double() <= widest * (1 + torch.finfo(stored).eps)).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_constant_groups_are_nearly_exact(bits: int, value: float) -> None:
    values = torch.full((2, 8), value)
    found = unpack_groups(pack_groups(values, bits, -1, torch.bfloat16), bits, torch.float32)
    assert bool(((found - values).abs() <= abs(value) * 2**-8).all())


def test_numbers_beyond_half_precision_stay_finite() -> None:
    values = torch.tensor([[-65504.0, 65504.0, 0.0, 1.0]], dtype=torch.float16)
    for bits in (2, 4, 8):
        assert bool(
            unpack_groups(pack_groups(values, bits, -1, torch.float16), bits, torch.float32).isfinite().all()
        )
