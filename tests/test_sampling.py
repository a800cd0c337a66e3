"""Logits to laws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 0.0, 0.0]])


def probs(logits: Tensor, temperature: float) -> Tensor:
    law = Sampler(SamplingParams(temperature)).law(logits, [])
    assert law.probs is not None
    return law.probs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_greedy_is_the_first_of_equal_largest_logits(dtype: torch.dtype) -> None:
    law = Sampler(SamplingParams(0)).law(LOGITS.to(dtype), [])
    assert law.ids is not None
    assert law.ids.tolist() == [1, 0]


def test_ties_in_a_large_vocabulary() -> None:
    """Kernels may search a row in parts."""
    logits = torch.zeros(3, 50_000)
    logits[1, [49_999, 31_000, 777]] = 1.0
    logits[2, 49_999] = 1.0
    law = Sampler(SamplingParams(0)).law(logits, [])
    assert law.ids is not None
    assert law.ids.tolist() == [0, 777, 49_999]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_softmax_is_at_least_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    law = probs(LOGITS.to(dtype), 1.0)
    assert law.dtype == wide
    torch.testing.assert_close(law, torch.softmax(LOGITS.to(dtype).to(wide), -1))


def test_temperature_divides() -> None:
    torch.testing.assert_close(probs(LOGITS, 0.5), torch.softmax(LOGITS * 2, -1))
    torch.testing.assert_close(probs(LOGITS, 1e9), torch.full((2, 4), 0.25))


def test_any_leading_shape() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    law = probs(logits, 0.7)
    assert law.shape == (2, 3, 5)
    torch.testing.assert_close(law[1, 2], probs(logits[1, 2], 0.7))


def test_a_forbidden_token_has_probability_zero() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0])
    assert probs(logits, 1.0).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        probs(LOGITS.to(dtype), temperature),
        torch.tensor([[0, 0.5, 0, 0.5], [1 / 3, 0, 1 / 3, 1 / 3]], dtype=dtype),
    )
