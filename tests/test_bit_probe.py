"""The probe asks for each place of a pass, in caches of any size, and sees logits that depend on the place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from toy_engine import ToyRunner
from toy_models import tiny_model

from experiments.bit_probe import CONTEXT, check_bits
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 50


def flat(text: Sequence[int]) -> list[float]:
    return [1 / VOCAB] * VOCAB


class Slanted(ToyRunner):
    """Rounds otherwise from a place in the pass on."""

    def __init__(self, place: int) -> None:
        super().__init__(flat, VOCAB, 2)
        self.place = place

    def verify(self, token_ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        logits = super().verify(token_ids, counts)
        logits[:, self.place :] += 0.25
        return logits


@pytest.mark.parametrize("place", [1, 2, 4])
def test_logits_that_depend_on_the_place_are_refused_in_a_line(place: int) -> None:
    with pytest.raises(ValueError, match="exactness=bitwise can't be promised") as caught:
        check_bits(Slanted(place), 5, 2, 100)
    message = str(caught.value)
    assert "up to 0.25" in message
    assert "2 x 5 tokens" in message
    assert "pass_tokens=8" in message
    assert "\n" not in message


def test_logits_that_do_not_are_promised() -> None:
    runner = ToyRunner(flat, VOCAB, 2)
    check_bits(runner, 5, 2, 100)
    assert runner.lengths == (0, 0)
    assert {len(tokens[0]) for verb, tokens in runner.passes if verb == "prefill"} == {CONTEXT}


def test_the_text_has_only_tokens_of_the_model() -> None:
    size = 8
    runner = ToyRunner(lambda text: [1 / size] * size, size, 2)
    check_bits(runner, 5, 2, 100)
    read = [token for _, rows in runner.passes for tokens in rows for token in tokens]
    assert set(read) == set(range(size))
    model = tiny_model(vocab_size=size)  # its embedding has no others
    check_bits(ModelRunner(model, 1, 20, pass_tokens=4), 4, 1, 20)


@pytest.mark.parametrize("capacity", [2, 3, 5, 8, 9, 20, 31, 32, 60])
def test_the_text_fits_the_cache(capacity: int) -> None:
    model = tiny_model(dtype=torch.bfloat16, hidden_size=64, intermediate_size=64)
    runner = ModelRunner(model, 2, capacity, pass_tokens=8)
    check_bits(runner, 8, 2, capacity)
    assert runner.lengths == (0, 0)
