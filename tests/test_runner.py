"""Prefill, decode and verify against transformers' own full forward, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from toy_models import CONTEXT_LENGTH, random_prompts, tiny_model
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from specdec import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD_DIM = 8
EXACT = 1e-12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def full_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """transformers' logits `[T, V]` of a text read in one pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(text)]), use_cache=False).logits[0]


def assert_equal(logits: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(logits, reference, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "length", [1, 2, HEAD_DIM - 1, HEAD_DIM, HEAD_DIM + 1, 4 * HEAD_DIM, 4 * HEAD_DIM + 1, CONTEXT_LENGTH]
)
def test_prefill_of_any_length(model: PreTrainedModel, length: int) -> None:
    text = random_prompts([length])[0]
    assert_equal(ModelRunner(model, 1, length).prefill([text], [0]), full_logits(model, text)[-1:])


@pytest.mark.parametrize("chunk", [1, 3, 32, 33, 40, 70, 71, 1000])
def test_prefill_in_chunks_equals_prefill_whole(model: PreTrainedModel, chunk: int) -> None:
    text = random_prompts([71])[0]
    runner = ModelRunner(model, 2, 80, prefill_chunk=chunk)
    assert_equal(runner.prefill([text, text[:5]], [0, 1])[:1], full_logits(model, text)[-1:])
    assert runner.lengths == (71, 5)


@pytest.mark.parametrize("chunk", [1, 7, 40, 71, 1000])
def test_extending_by_chunks_has_the_bits_of_prefill_in_those_chunks(
    model: PreTrainedModel, chunk: int
) -> None:
    text = random_prompts([71])[0]
    whole, extended = (ModelRunner(model, 2, 80, prefill_chunk=size) for size in (chunk, None))
    expected = whole.prefill([text], [1])
    for start in range(0, len(text), chunk):
        logits = extended.extend(text[start : start + chunk], 1)
    assert torch.equal(logits, expected)
    assert extended.lengths == whole.lengths == (0, 71)
    following = torch.tensor([[0], [5]])
    assert torch.equal(extended.decode(following, [0, 1])[1], whole.decode(following, [0, 1])[1])


def test_a_prompt_read_between_the_steps_of_other_rows_is_read_alike(model: PreTrainedModel) -> None:
    text, other = random_prompts([12, 16])
    alone, beside = (ModelRunner(model, 2, 20, prefill_chunk=4) for _ in range(2))
    expected = alone.prefill([text], [1])
    alone.prefill([other[:13]], [0])
    beside.prefill([other[:13]], [0])
    for start in (0, 4, 8):
        logits = beside.extend(text[start : start + 4], 1)
        token = torch.tensor([other[beside.lengths[0] : beside.lengths[0] + 1]])
        stepped = beside.decode(token)
        beside.commit([beside.lengths[0]])
        assert torch.equal(stepped, alone.decode(token))
        alone.commit([alone.lengths[0]])
    assert torch.equal(logits, expected)
    assert beside.lengths == alone.lengths == (16, 12)


def test_extending_beyond_the_capacity_is_refused(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, 1, 5)
    runner.extend([1, 2, 3], 0)
    with pytest.raises(ValueError, match="holds 3 tokens and gets 3 in a pass of 3, but its capacity is 5"):
        runner.extend([4, 5, 6], 0)
    assert runner.lengths == (3,)


def test_prefill_into_slots_in_any_order(model: PreTrainedModel) -> None:
    prompts = random_prompts([5, 9])
    runner = ModelRunner(model, 3, 20)
    logits = runner.prefill(prompts, [2, 0])
    assert runner.lengths == (9, 0, 5)
    for row, prompt in zip(logits, prompts, strict=True):
        assert_equal(row, full_logits(model, prompt)[-1])


def test_prefill_into_a_slot_in_use_is_refused(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, 1, 20)
    runner.prefill([[1, 2, 3]], [0])
    with pytest.raises(ValueError, match="slot 0 holds 3 tokens"):
        runner.prefill([[4, 5]], [0])
    runner.release(0)
    assert_equal(runner.prefill([[4, 5]], [0]), full_logits(model, [4, 5])[-1:])


def test_decode_of_ragged_rows(model: PreTrainedModel) -> None:
    texts = random_prompts([4, 9, 17])
    runner = ModelRunner(model, 3, 20)
    runner.prefill([text[:-3] for text in texts], [0, 1, 2])
    for left in (3, 2, 1):
        logits = runner.decode(torch.tensor([[text[-left]] for text in texts]))
        for row, text in zip(logits, texts, strict=True):
            assert_equal(row, full_logits(model, text[: len(text) - left + 1])[-1])


@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 3, 2), (0, 3, 1), (0, 0, 2), (3, 0, 0)])
def test_decode_catches_up_by_unequal_counts(model: PreTrainedModel, counts: tuple[int, ...]) -> None:
    texts = random_prompts([6, 9, 17])
    held = [len(text) - count for text, count in zip(texts, counts, strict=True)]
    runner = ModelRunner(model, 3, 17)
    runner.prefill([text[:n] for text, n in zip(texts, held, strict=True)], [0, 1, 2])
    width = max(counts)
    tokens = [(text[n:] + [0] * width)[:width] for text, n in zip(texts, held, strict=True)]
    logits = runner.decode(torch.tensor(tokens), counts)
    assert runner.lengths == (6, 9, 17)
    for row, text, count in zip(logits, texts, counts, strict=True):
        if count:
            assert_equal(row, full_logits(model, text)[-1])
    # and a row that got nothing was not harmed
    runner.commit([5, 8, 16])
    again = runner.decode(torch.tensor([[text[-1]] for text in texts]))
    for row, text in zip(again, texts, strict=True):
        assert_equal(row, full_logits(model, text)[-1])


@pytest.mark.parametrize(
    "counts", [(6, 6, 6), (1, 3, 6), (6, 1, 2), (1, 1, 1), (0, 6, 3), (2, 0, 0), (40, 7, 1), (40, 40, 40)]
)
def test_verify_of_ragged_rows(model: PreTrainedModel, counts: tuple[int, ...]) -> None:
    """Widths on both sides of the limit between matrix products and the fused kernel."""
    texts = random_prompts([41, 50, 47])
    held = [len(text) - count for text, count in zip(texts, counts, strict=True)]
    runner = ModelRunner(model, 3, 50)
    runner.prefill([text[:n] for text, n in zip(texts, held, strict=True)], [0, 1, 2])
    width = max(counts)
    tokens = [(text[n:] + [0] * width)[:width] for text, n in zip(texts, held, strict=True)]
    logits = runner.verify(torch.tensor(tokens), counts)
    assert logits.shape == (3, width, runner.vocab_size)
    for row, text, n, count in zip(logits, texts, held, counts, strict=True):
        assert_equal(row[:count], full_logits(model, text)[n:])


def test_rows_that_end_at_the_capacity_beside_padding(model: PreTrainedModel) -> None:
    """A full row (count 0) and rows whose padding would lie beyond the capacity and the context."""
    capacity = CONTEXT_LENGTH
    texts = random_prompts([capacity, capacity, capacity - 6])
    counts = [0, 1, 6]
    runner = ModelRunner(model, 3, capacity)
    runner.prefill([texts[0], texts[1][:-1], texts[2][:-6]], [0, 1, 2])
    tokens = torch.tensor([[9] * 6, [texts[1][-1], 9, 9, 9, 9, 9], texts[2][-6:]])
    logits = runner.verify(tokens, counts)
    assert_equal(logits[1, 0], full_logits(model, texts[1])[-1])
    assert_equal(logits[2], full_logits(model, texts[2])[-6:])
    runner.commit([capacity - 1, capacity - 1, capacity - 7])
    again = runner.decode(torch.tensor([[text[-1]] for text in texts]))
    for row, text in zip(again, texts, strict=True):
        assert_equal(row, full_logits(model, text)[-1])


def test_rejected_tokens_leave_no_trace(model: PreTrainedModel) -> None:
    """Reject all but k of a block, go on: the bits of a runner that never saw the rejected tokens."""
    texts = random_prompts([12, 20])
    junk = torch.tensor([[7, 8, 9, 10, 11], [3, 1, 4, 1, 5]])
    for kept in (0, 2, 4):
        rolled, fresh = ModelRunner(model, 2, 40), ModelRunner(model, 2, 40)
        for runner in (rolled, fresh):
            runner.prefill(texts, [0, 1])
        accepted = junk[:, : kept + 1]
        rolled.verify(torch.cat([accepted, junk[:, kept + 1 :].flip(1)], 1), [5, 5])
        fresh.verify(torch.cat([accepted, torch.zeros_like(junk[:, kept + 1 :])], 1), [5, 5])
        for runner in (rolled, fresh):
            runner.commit([12 + kept + 1, 20 + kept + 1])
        following = torch.tensor([[1, 2, 3], [4, 5, 6]])
        assert torch.equal(rolled.verify(following, [3, 2])[0], fresh.verify(following, [3, 2])[0])


def test_stale_data_is_never_seen(model: PreTrainedModel) -> None:
    """Two runs with the same passes, one on a buffer full of huge numbers: the same bits."""
    texts = random_prompts([6, 40])
    outputs = []
    for filling in (0.0, 1e100):
        runner = ModelRunner(model, 2, 60)
        store = runner.cache.store
        store._keys.fill_(filling)  # type: ignore[attr-defined]
        store._values.fill_(filling)  # type: ignore[attr-defined]
        logits = [runner.prefill(texts, [0, 1])]
        verified = runner.verify(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), [2, 4])
        logits += [verified[0, :2], verified[1]]
        runner.commit([7, 43])
        logits += [runner.decode(torch.tensor([[9, 9], [8, 7]]), [1, 2])]
        outputs.append(logits)
    for clean, dirty in zip(*outputs, strict=True):
        assert torch.equal(clean, dirty)


def test_move_and_release(model: PreTrainedModel) -> None:
    texts = random_prompts([6, 9])
    runner = ModelRunner(model, 2, 20)
    runner.prefill(texts, [0, 1])
    runner.release(0)
    runner.move(1, 0)
    assert runner.lengths == (9, 0)
    assert_equal(runner.decode(torch.tensor([[3]])), full_logits(model, [*texts[1], 3])[-1:])
    assert_equal(runner.prefill(texts[:1], [1]), full_logits(model, texts[0])[-1:])


def test_identical_prompts_get_identical_bits(model: PreTrainedModel) -> None:
    prompt = random_prompts([9])[0]
    runner = ModelRunner(model, 4, 20)
    logits = runner.prefill([prompt] * 4, [0, 1, 2, 3])
    assert torch.equal(logits, logits[:1].expand_as(logits))
    verified = runner.verify(torch.tensor([[1, 2, 3]] * 4), [3] * 4)
    torch.testing.assert_close(verified, verified[:1].expand_as(verified), rtol=0, atol=EXACT)


def test_a_text_beyond_the_capacity_is_refused(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, 1, 5)
    with pytest.raises(ValueError, match="capacity is 5"):
        runner.prefill([[1] * 6], [0])
    runner.prefill([[1] * 5], [0])
    with pytest.raises(ValueError, match="capacity is 5"):
        runner.decode(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="1 slots"):
        runner.verify(torch.tensor([[1], [1]]), [0, 0])


def test_sizes_are_checked(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="129 tokens exceed the model's context of 128"):
        ModelRunner(model, 1, CONTEXT_LENGTH + 1)
    for num_slots, capacity in ((0, 5), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ModelRunner(model, num_slots, capacity)
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        ModelRunner(model, 1, 5, prefill_chunk=0)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 6, "use_sliding_window": False}),
    ],
    ids=["all layers", "some layers", "unused"],
)
def test_a_sliding_window_slides(family: str, more: dict, chunk: int | None) -> None:
    model = tiny_model(family, **more)
    text = random_prompts([20])[0]
    expected = full_logits(model, text)
    runner = ModelRunner(model, 1, 20, prefill_chunk=chunk)
    assert_equal(runner.prefill([text[:15]], [0]), expected[14:15])
    assert_equal(runner.verify(torch.tensor([text[15:18]]), [3])[0], expected[15:18])
    runner.commit([16])
    assert_equal(runner.decode(torch.tensor([[text[16]]])), expected[16:17])


def test_an_unknown_family_is_refused_by_name() -> None:
    unknown = BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match=r"'bloom' is not known .* llama"):
        ModelRunner(unknown, 1, 8)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_rotates_with_the_text_is_refused(rope_type: str) -> None:
    rope: dict[str, object] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope["original_max_position_embeddings"] = 64
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match=rope_type):
        ModelRunner(model, 1, 8)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_static_rope_types(rope: dict[str, object]) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    text = random_prompts([100])[0]
    runner = ModelRunner(model, 1, 100)
    runner.prefill([text[:-4]], [0])
    assert_equal(runner.verify(torch.tensor([text[-4:]]), [4])[0], full_logits(model, text)[-4:])


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    text = random_prompts([7])[0]
    before = model.config._attn_implementation
    runner = ModelRunner(model, 1, 10)
    runner.prefill([text], [0])
    assert model.config._attn_implementation == before
    with pytest.raises(IndexError):
        runner.decode(torch.tensor([[1000]]))  # no such token
    assert model.config._attn_implementation == before


def test_no_gradient_is_recorded(model: PreTrainedModel) -> None:
    assert not ModelRunner(model, 1, 4).prefill([[1, 2]], [0]).requires_grad
