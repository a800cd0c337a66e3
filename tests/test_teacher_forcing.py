"""Texts are read through the cache, in passes of the size that was asked for, and what a cache loses shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from toy_engine import ToyRunner, chain
from toy_models import CONTEXT_LENGTH, random_prompts, tiny_model
from transformers import PreTrainedModel

from experiments.teacher_forcing import ForcedText, Reader, read_together
from specdec.kv_stores.dense import DenseStore
from specdec.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = [[0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [1.0, 0.0, 0.0]]
TEXT = ForcedText(tuple(random_prompts([30], seed=3)[0]), 7)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


class LossyStore(DenseStore):
    """What is final is stored coarsely: the values of committed tokens are rounded to quarters."""

    def commit(self, lengths: Sequence[int]) -> None:
        for slot, length in enumerate(lengths):
            kept = self._values[:, slot, :, :length]
            kept.copy_((4 * kept).round() / 4)


def logits_of(reader: Reader, text: ForcedText) -> torch.Tensor:
    """`[num_scored, V]`."""
    return torch.cat([window.logits["one"] for window in read_together({"one": reader}, text)])


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("num_given", [1, 7, 29])
def test_logits_are_those_of_one_forward(model: PreTrainedModel, chunk: int, num_given: int) -> None:
    text = ForcedText(TEXT.token_ids, num_given)
    found = logits_of(Reader(ModelRunner(model, 1, 30), chunk), text)
    with torch.no_grad():
        expected = model(torch.tensor([text.token_ids])).logits[0, num_given - 1 : -1]
    assert len(found) == text.num_scored
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_passes_are_as_wide_as_asked_for_and_the_last_token_is_only_predicted() -> None:
    runner = ToyRunner(chain(TABLE), 3, 1)
    tokens = (0, 1, 2, 0, 0, 1, 2, 2)
    windows = list(read_together({"one": Reader(runner, 2)}, ForcedText(tokens, 3)))
    assert [(verb, *read) for verb, read in runner.passes] == [
        ("prefill", (0, 1, 2)),
        ("verify", (0, 0)),
        ("verify", (1, 2)),
    ]
    assert [(window.start, window.next_ids) for window in windows] == [(3, (0,)), (4, (0, 1)), (6, (2, 2))]
    laws = torch.cat([window.logits["one"] for window in windows]).exp()
    torch.testing.assert_close(laws, torch.tensor([TABLE[token] for token in tokens[2:-1]]).double())
    assert runner.lengths == (0,)


def test_readers_of_other_widths_keep_in_step() -> None:
    wide, narrow = ToyRunner(chain(TABLE), 3, 1), ToyRunner(chain(TABLE), 3, 1)
    text = ForcedText((0, 1, 2) * 5, 2)
    readers = {"wide": Reader(wide, 5), "narrow": Reader(narrow, 2)}
    for window in read_together(readers, text):
        torch.testing.assert_close(window.logits["wide"], window.logits["narrow"])
        assert len(window.logits["wide"]) == len(window.next_ids) <= 5
    assert [len(read[0]) for _, read in wide.passes] == [2, 5, 5, 2]
    assert [len(read[0]) for _, read in narrow.passes] == [2, 2, 2, 1, 2, 2, 1, 2]


def test_what_a_store_loses_when_it_packs_shows_as_in_decoding(model: PreTrainedModel) -> None:
    """And not in a pass over the whole text, which is before anything is packed."""
    dense = logits_of(Reader(ModelRunner(model, 1, 30), 1), TEXT)
    lossy = logits_of(Reader(ModelRunner(model, 1, 30, make_store=LossyStore), 1), TEXT)
    torch.testing.assert_close(
        lossy[0], dense[0]
    )  # the prompt's last token: nothing is final before it is read
    assert (lossy[1:] - dense[1:]).abs().amax(-1).min() > 1e-3
    at_once = ModelRunner(model, 1, 30, make_store=LossyStore).prefill([TEXT.token_ids[:-1]], [0])
    torch.testing.assert_close(at_once[0], dense[-1])

    runner = ModelRunner(model, 1, 30, make_store=LossyStore)
    decoded = [runner.prefill([TEXT.token_ids[:7]], [0])[0]]
    for index in range(7, len(TEXT.token_ids) - 1):
        decoded.append(runner.decode(torch.tensor([[TEXT.token_ids[index]]]))[0])
        runner.commit([index + 1])
    torch.testing.assert_close(lossy, torch.stack(decoded))


def test_wider_passes_see_more_that_is_not_packed(model: PreTrainedModel) -> None:
    ones = logits_of(Reader(ModelRunner(model, 1, 30, make_store=LossyStore), 1), TEXT)
    wide = logits_of(Reader(ModelRunner(model, 1, 30, make_store=LossyStore), 5), TEXT)
    assert (ones - wide).abs().max() > 1e-3


def test_a_prompt_is_packed_before_the_first_wide_pass(model: PreTrainedModel) -> None:
    dense = logits_of(Reader(ModelRunner(model, 1, 30), 16), TEXT)
    lossy = logits_of(Reader(ModelRunner(model, 1, 30, make_store=LossyStore), 16), TEXT)
    assert (lossy[1:] - dense[1:]).abs().amax(-1).min() > 1e-3


def test_slots_are_empty_after_a_text_whatever_happens(model: PreTrainedModel) -> None:
    good = ModelRunner(model, 1, CONTEXT_LENGTH)
    small = ModelRunner(model, 1, 8)
    readers = {"good": Reader(good, 4), "small": Reader(small, 4)}
    with pytest.raises(ValueError, match="its capacity is 8"):
        for _ in read_together(readers, TEXT):
            pass
    for window in read_together({"good": readers["good"]}, TEXT):
        if window.start > 8:
            break
    assert good.lengths == small.lengths == (0,)


@pytest.mark.parametrize("num_given", [0, 3, 4])
def test_a_text_gives_something_and_scores_something(num_given: int) -> None:
    with pytest.raises(ValueError, match=f"{num_given} given of 3 tokens"):
        ForcedText((1, 2, 3), num_given)
