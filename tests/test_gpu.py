"""The engine on CUDA: pytest -m gpu. Toy models in float64, so that outputs must be equal, not close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_models import FAMILIES, random_prompts, tiny_model

import specdec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def on_gpu(model: Any) -> Any:
    return model.to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_output_is_the_cpus(family: str, num_slots: int) -> None:
    prompts = random_prompts([3, 9, 17])
    expected = specdec.generate(tiny_model(family), prompts, max_new_tokens=20)
    target, draft = on_gpu(tiny_model(family)), on_gpu(tiny_model(family, seed=1))
    for drafter in (None, draft, target, specdec.PromptLookupOptions()):
        answers = specdec.generate(target, prompts, drafter=drafter, max_new_tokens=20, num_slots=num_slots)
        assert answers == expected


def test_sampled_output_is_the_cpus() -> None:
    prompts = random_prompts([3, 9, 17])
    expected = specdec.generate(tiny_model(), prompts, max_new_tokens=20, temperature=1.0, seed=5)
    answers = specdec.generate(on_gpu(tiny_model()), prompts, max_new_tokens=20, temperature=1.0, seed=5)
    assert answers == expected
