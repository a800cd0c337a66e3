"""Penalties, biases, bans and cuts, by hand; and that each sees the true text of its position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.processors import BadWords, CountPenalties, LogitBias, MinNewTokens, RepetitionPenalty, Text
from specdec.progress import Row
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams

NEVER = -math.inf


def text(*token_ids: int, prompt: int = 0) -> Text:
    return Text(0, token_ids, prompt)


def zeros(rows: int = 1, size: int = 4) -> Tensor:
    return torch.zeros(rows, size, dtype=torch.float64)


def row_of(prompt: list[int], *answer: int) -> Row:
    row = Row(Request(0, tuple(prompt), 20), 0)
    row.token_ids.extend(answer)
    return row


def test_a_bias_is_added_and_may_ban() -> None:
    assert LogitBias({1: 2.5, 3: NEVER})(zeros(), [text()]).tolist() == [[0, 2.5, 0, NEVER]]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_all_that_occurred() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    changed = RepetitionPenalty(2.0)(logits.clone(), [text(0, 1, 0, prompt=2)])
    assert changed.tolist() == [[0.5, -2.0, 2.0, -2.0]]
    theirs = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1, 0]]), logits.clone())
    assert changed.tolist() == theirs.tolist()


def test_counts_are_of_the_answer_alone() -> None:
    changed = CountPenalties(frequency=0.5, presence=0.25)(zeros(), [text(3, 3, 1, 2, 1, prompt=2)])
    assert changed.tolist() == [[0, -1.25, -0.75, 0]]


def test_a_word_is_banned_where_the_text_ends_with_its_beginning() -> None:
    words = ((2,), (0, 1), (3, 0, 1))
    texts = [text(3, 0), text(0), text(1), text()]
    changed = BadWords(words)(zeros(4), texts)
    assert changed.tolist() == [
        [0, NEVER, NEVER, 0],
        [0, NEVER, NEVER, 0],
        [0, 0, NEVER, 0],
        [0, 0, NEVER, 0],
    ]
    theirs = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    assert theirs(torch.tensor([[3, 0]]), zeros()).tolist() == changed[:1].tolist()


def test_stop_tokens_are_banned_until_the_answer_is_long_enough() -> None:
    texts = [text(1, 2, prompt=2), text(1, 2, 3, prompt=2), text(1, 2, 3, 3, prompt=2)]
    changed = MinNewTokens(2, {3})(zeros(3), texts)
    assert changed[:, 3].tolist() == [NEVER, NEVER, 0]


def test_each_position_sees_the_draft_tokens_before_it() -> None:
    """Repetition over a verify pass equals repetition over the passes of plain decoding."""
    sampler = Sampler(SamplingParams(repetition_penalty=3.0, presence_penalty=0.5))
    logits = torch.tensor([[[1.0, 2.0, -1.0, 0.5]] * 4])
    row, drafts = row_of([0], 3), torch.tensor([[1, 2, 1]])
    together = sampler.scores(logits, [row], drafts)
    for offset in range(4):
        alone = sampler.scores(logits[:, offset], [row_of([0], 3, *[1, 2, 1][:offset])])
        assert together[:, offset].tolist() == alone.tolist()


def test_logits_of_a_draft_model_are_behind_all_drafts() -> None:
    sampler = Sampler(SamplingParams(bad_words=((2, 1),)))
    scores = sampler.scores(zeros(), [row_of([0])], torch.tensor([[3, 2]]))
    assert scores.tolist() == [[0, NEVER, 0, 0]]


def test_the_models_own_logits_stay_as_they_are() -> None:
    logits = zeros()
    Sampler(SamplingParams(logit_bias=((0, 1.0),))).law(logits, [row_of([0])])
    assert logits.tolist() == [[0, 0, 0, 0]]


def test_greedy_obeys_bans() -> None:
    law = Sampler(SamplingParams(logit_bias=((2, NEVER),))).law(
        torch.tensor([[0.0, 1.0, 3.0, 2.0]]), [row_of([0])]
    )
    assert law.ids is not None
    assert law.ids.tolist() == [3]


@pytest.mark.parametrize(
    ("option", "warper"),
    [
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"typical_p": 0.5}, TypicalLogitsWarper(0.5)),
    ],
    ids=["top_k", "top_p", "min_p", "typical_p"],
)
def test_cuts_are_those_of_transformers(option: dict, warper: object) -> None:
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = Sampler(SamplingParams(1.0, **option)).law(logits, [])
    theirs = torch.softmax(warper(torch.zeros(20, 1, dtype=torch.long), logits.clone()), -1)  # type: ignore[operator]
    assert law.probs is not None
    torch.testing.assert_close(law.probs, theirs, rtol=1e-12, atol=1e-15)
    assert ((law.probs == 0) == (theirs == 0)).all()


def test_s9_no_token_below_the_floor_of_min_p() -> None:
    law = Sampler(SamplingParams(1.0, min_p=0.3)).law(
        torch.tensor([0.4, 0.35, 0.1, 0.15]).log().unsqueeze(0), []
    )
    assert law.probs is not None
    torch.testing.assert_close(law.probs, torch.tensor([[0.4 / 0.9, 0.35 / 0.9, 0, 0.15 / 0.9]]))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("typical_p", 0.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.inf),
        ("min_new_tokens", -1),
        ("bad_words", ((),)),
    ],
)
def test_values_out_of_range_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{option}="):
        SamplingParams(1.0, **{option: value})  # type: ignore[arg-type]
