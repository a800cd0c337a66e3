"""The configuration of sampling: stops that span tokens and blocks, words in token ids, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_engine import collect
from toy_folders import EOS_ID, repeating_prompts, save_model, save_prompts, words
from toy_models import VOCAB_SIZE
from transformers import PreTrainedTokenizerFast

from experiments.config import SamplingConfig, compose_run
from experiments.point import PreparedPoint, prepare
from experiments.sampling import FirstOf, StopStrings, sampling_params, stop_ids, stop_rule
from experiments.strategy import build_decoder
from specdec.progress import StopTokens
from specdec.types import Phase, SamplingParams, StepOutput

pytestmark = pytest.mark.usefixtures("one_thread")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    save_model(folder / "target", seed=2)
    save_prompts(folder / "prompts.jsonl", repeating_prompts((3, 6, 5)))
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A point sets torch's threads for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def point(root: Path, *overrides: str) -> PreparedPoint:
    base = {
        "strategy": "specdec",
        "drafter.weights": "plain",
        "model.target": str(root / "target"),
        "workload": "jsonl",
        "workload.path": str(root / "prompts.jsonl"),
        "workload.max_new_tokens": str(NEW_TOKENS),
        "dtype": "fp32",
        "threads": "1",
    }
    given = {override.partition("=")[0] for override in overrides}
    kept = [f"{key}={value}" for key, value in base.items() if key not in given]
    return prepare(compose_run([*kept, *overrides]))


def steps_of(ready: PreparedPoint, arm: str) -> list[StepOutput]:
    """Of one arm: the strategy, or the twin that decodes one token per pass."""
    decoder = build_decoder(getattr(ready.arms, arm), ready.pool, ready.settings)
    return [step for block in ready.blocks for step in decoder.generate(block)]


def answers(root: Path, *overrides: str, arm: str = "twin") -> list[list[int]]:
    return answers_of(point(root, *overrides), arm)


def answers_of(ready: PreparedPoint, arm: str) -> list[list[int]]:
    texts = collect(steps_of(ready, arm))
    return [texts[request] for request in sorted(texts)]


@cache
def unlimited(root: Path) -> list[list[int]]:
    """The greedy answers without any stop but the length."""
    found = answers(root, "sampling.ignore_eos=true")
    assert {len(answer) for answer in found} == {NEW_TOKENS}
    return found


def cut_behind(answer: Sequence[int], string: str) -> list[int]:
    """The shortest beginning of the answer that says `string`, or all of it."""
    lengths = range(1, len(answer) + 1)
    return list(answer[: next((n for n in lengths if string in words(answer[:n])), len(answer))])


# --- stop strings


@pytest.fixture(scope="module")
def by_length(root: Path) -> list[PreparedPoint]:
    """The drafter is the target itself: steps write 2, 3 or 5 tokens each, behind the first one."""
    found = [point(root, "sampling.ignore_eos=true", f"draft_length.max={length}") for length in (1, 2, 4)]
    for ready, size in zip(found, (2, 3, 5), strict=True):
        steps = steps_of(replace(ready, requests=ready.requests[1:2]), "strategy")
        assert {len(step.committed[0]) for step in steps[1:-1]} == {size}
    return found


@pytest.mark.parametrize("start", range(1, 11))
def test_a_stop_string_ends_an_answer_wherever_blocks_end(
    root: Path, by_length: list[PreparedPoint], start: int
) -> None:
    """The string begins within a token and ends within the next but one: blocks end at each place of it."""
    first, second, third = (f"w{token}" for token in unlimited(root)[1][start : start + 3])
    string = f"{first[1:]} {second} {third[:2]}"
    expected = [cut_behind(one, string) for one in unlimited(root)]
    assert len(expected[1]) <= start + 3
    for ready in by_length:
        config = replace(ready.config, sampling=replace(ready.config.sampling, stop=[string]))
        for batch_size in (1, 3):
            stopping = replace(ready, config=replace(config, batch_size=batch_size))
            assert answers_of(stopping, "strategy") == answers_of(stopping, "twin") == expected


def test_the_first_of_several_stops_wins(root: Path) -> None:
    answer = unlimited(root)[0]
    strings = [f"w{answer[9]} w{answer[10]}", f"w{answer[3]} w{answer[4]}"]
    overrides = (f"sampling.stop=['{strings[0]}','{strings[1]}']", "workload.limit=1")
    expected = min((cut_behind(answer, string) for string in strings), key=len)
    assert len(expected) <= 5
    assert answers(root, *overrides) == answers(root, *overrides, arm="strategy") == [expected]
    # A token that comes earlier still wins over both.
    sooner = (*overrides, f"sampling.stop_token_ids=[{answer[1]}]")
    assert answers(root, *sooner, arm="strategy") == [answer[: answer.index(answer[1]) + 1]]


def test_a_prompt_does_not_stop_its_answer(root: Path) -> None:
    (prompt, *_) = repeating_prompts((3, 6, 5))
    string = words(prompt[:2])
    assert string not in words(unlimited(root)[0])
    found = answers(root, f"sampling.stop=['{string}']", "sampling.ignore_eos=true", "workload.limit=1")
    assert found == unlimited(root)[:1]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and for `ab` with and without the space before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ab", "Ġab"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b"), ("Ġ", "ab")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("string", ["é", "née", "€!", "b é", "\n\n"])
def test_a_stop_string_may_have_characters_of_several_tokens(string: str) -> None:
    tokenizer = byte_tokenizer()
    before, text = "a" * 30 + " ", f"{string}; and more"
    token_ids = tokenizer.encode(before + text, add_special_tokens=False)
    end = len(tokenizer.encode(before + string, add_special_tokens=False))
    rule = StopStrings((string, "never said"), tokenizer)
    assert rule.first_end(token_ids, 0) == end
    assert rule.first_end(token_ids[: end - 1], 0) is None
    for start in range(end):  # however many of its tokens were looked at before
        assert rule.first_end(token_ids, start) == end


def test_the_rule_is_of_tokens_alone_where_no_string_stops() -> None:
    tokenizer = byte_tokenizer()
    assert stop_rule(SamplingConfig(), [7], tokenizer) == StopTokens(frozenset({7}))
    rule = stop_rule(SamplingConfig(stop=["ab"], stop_token_ids=[5]), [7], tokenizer)
    assert rule == FirstOf((StopTokens(frozenset({5, 7})), StopStrings(("ab",), tokenizer)))
    assert [rule.first_end(ids, 0) for ids in ([1, 7, 2], [5], [1, 2])] == [2, 1, None]


# --- stop tokens


def test_ids_that_end_an_answer() -> None:
    assert stop_ids(SamplingConfig(), [7, 8]) == {7, 8}
    assert stop_ids(SamplingConfig(ignore_eos=True), [7, 8]) == frozenset()
    assert stop_ids(SamplingConfig(stop_token_ids=[3]), [7, 8]) == {3, 7, 8}
    assert stop_ids(SamplingConfig(stop_token_ids=[3], ignore_eos=True), [7, 8]) == {3}


@pytest.mark.parametrize("arm", ["twin", "strategy"])
def test_an_answer_goes_on_behind_the_end_of_text_that_is_ignored(root: Path, arm: str) -> None:
    # At this temperature a token is the end with a probability of about 1 / 61; the seed is fixed.
    overrides = ("sampling.temperature=3", "workload.max_new_tokens=100")
    stopped = answers(root, *overrides, arm=arm)
    whole = answers(root, *overrides, "sampling.ignore_eos=true", arm=arm)
    assert {len(answer) for answer in whole} == {100}
    assert any(len(answer) < 100 for answer in stopped)
    for short, long in zip(stopped, whole, strict=True):
        assert short == long[: len(short)]
        assert (short[-1] == EOS_ID) or len(short) == 100


def test_a_stop_token_of_ones_own_ends_an_answer(root: Path) -> None:
    answer = unlimited(root)[2]
    stop = answer[7]
    overrides = (f"sampling.stop_token_ids=[{stop}]", "sampling.ignore_eos=true")
    expected = [one[: one.index(stop) + 1] if stop in one else one for one in unlimited(root)]
    assert answers(root, *overrides) == answers(root, *overrides, arm="strategy") == expected
    later = (*overrides, "sampling.min_new_tokens=12")
    found = answers(root, *later)
    assert found == answers(root, *later, arm="strategy")
    assert all(stop not in one[:11] and len(one) >= 12 for one in found)


# --- words and biases


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    tokenizer = byte_tokenizer()
    bare, spaced = (tokenizer.convert_tokens_to_ids(piece) for piece in ("ab", "Ġab"))
    found = sampling_params(SamplingConfig(bad_words=["ab"]), tokenizer).bad_words
    assert found == ((bare,), (spaced,))
    letters = [tokenizer.convert_tokens_to_ids(piece) for piece in ("b", "a", "Ġ")]
    found = sampling_params(SamplingConfig(bad_words=["ba"]), tokenizer).bad_words
    assert found == (tuple(letters[:2]), (letters[2], *letters[:2]))


def test_spellings_that_are_one_are_given_once(root: Path) -> None:
    """This tokenizer knows no spaces."""
    tokenizer = point(root).pool.tokenizer
    config = SamplingConfig(bad_words=["w5 w6", "w7", "w5 w6"])
    assert sampling_params(config, tokenizer).bad_words == ((5, 6), (7,))


def test_bad_words_are_never_written(root: Path) -> None:
    answer = unlimited(root)[0]
    overrides = (f"sampling.bad_words=[w{answer[2]},'w{answer[4]} w{answer[5]}']", "sampling.ignore_eos=true")
    found = answers(root, *overrides)
    assert found == answers(root, *overrides, arm="strategy")
    assert found[0][:2] == answer[:2]
    assert all(answer[2] not in one for one in found)
    assert all((answer[4], answer[5]) not in pairwise(one) for one in found)


def test_biases_reach_the_logits(root: Path) -> None:
    overrides = ("sampling.logit_bias=[[5,1000],[6,-inf]]", "workload.limit=1")
    assert answers(root, *overrides) == answers(root, *overrides, arm="strategy") == [[5] * NEW_TOKENS]


def names_of(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def test_the_configuration_has_the_engines_settings_and_those_of_stops() -> None:
    assert names_of(SamplingConfig) == names_of(SamplingParams) | {"stop", "stop_token_ids", "ignore_eos"}


def test_the_configuration_has_the_engines_defaults() -> None:
    assert sampling_params(SamplingConfig(), byte_tokenizer()) == SamplingParams()


def test_every_setting_reaches_the_engine(root: Path) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "min_new_tokens": 3,
    }
    assert {*given, "logit_bias", "bad_words"} == names_of(
        SamplingParams
    )  # the two that are not copied as they are
    settings = point(root, *(f"sampling.{name}={value}" for name, value in given.items())).settings
    assert {name: getattr(settings.sampling, name) for name in given} == given
    assert settings.sampling == replace(settings.sampling, logit_bias=(), bad_words=())
    assert settings.stop_ids == {EOS_ID}


def test_a_sampled_run_with_everything_on_ends(root: Path) -> None:
    overrides = (
        "sampling.temperature=1",
        "sampling.top_k=20",
        "sampling.top_p=0.9",
        "sampling.repetition_penalty=1.2",
        "sampling.presence_penalty=0.5",
        "sampling.bad_words=[w1]",
        "sampling.stop=[w2 w]",
        "sampling.min_new_tokens=3",
    )
    steps = steps_of(point(root, *overrides), "strategy")
    assert any(step.phase == Phase.VERIFY for step in steps)
    texts = collect(steps)
    assert sorted(texts) == [0, 1, 2]
    assert all(1 not in text and 3 <= len(text) <= NEW_TOKENS for text in texts.values())


# --- what is refused


@pytest.mark.parametrize(
    ("override", "words_of_refusal"),
    [
        ("top_k=-1", r"sampling.top_k=-1: expected at least 0"),
        ("top_p=0", r"sampling.top_p=0.0: expected a number above 0, at most 1"),
        ("top_p=1.5", r"sampling.top_p=1.5: expected a number above 0, at most 1"),
        ("top_p=nan", r"sampling.top_p=nan: expected"),
        ("min_p=1.5", r"sampling.min_p=1.5: expected a number from 0 to 1"),
        ("typical_p=0", r"sampling.typical_p=0.0: expected"),
        ("repetition_penalty=0", r"sampling.repetition_penalty=0.0: expected a finite number above 0"),
        ("frequency_penalty=inf", r"sampling.frequency_penalty=inf: expected a finite number"),
        ("presence_penalty=nan", r"sampling.presence_penalty=nan: expected a finite number"),
        ("min_new_tokens=-1", r"sampling.min_new_tokens=-1: expected at least 0"),
        ("temperature=1e-40", r"sampling.temperature=1e-40: expected 0 "),
        ("temperature=-1", r"sampling.temperature=-1.0: expected"),
        ("logit_bias=[[5]]", r"sampling.logit_bias=\[\[5\]\]: expected pairs"),
        ("logit_bias=[5]", r"sampling.logit_bias=\[5\]: expected pairs"),
        ("logit_bias=[[1.5,2]]", r"sampling.logit_bias=\[\[1.5, 2\]\]: expected pairs"),
        ("logit_bias=[[-1,2]]", r"sampling.logit_bias=\[\[-1, 2\]\]: expected pairs"),
        ("logit_bias=[[5,inf]]", r"sampling.logit_bias=\[\[5, inf\]\]: expected pairs"),
        ("logit_bias=[[5,nan]]", r"sampling.logit_bias=\[\[5, nan\]\]: expected pairs"),
        ("logit_bias=[[5,high]]", r"sampling.logit_bias=\[\[5, 'high'\]\]: expected pairs"),
        (f"logit_bias=[[{VOCAB_SIZE},1]]", r"sampling.logit_bias=.*61.*: expected token ids below 61"),
        (f"stop_token_ids=[3,{VOCAB_SIZE}]", r"sampling.stop_token_ids=.*61.*: expected token ids below 61"),
        ("stop_token_ids=[-1]", r"sampling.stop_token_ids=.*-1.*: expected token ids below 61"),
        ("stop=['']", r"sampling.stop=\[''\]: expected strings of at least one character"),
        ("bad_words=['']", r"sampling.bad_words=\[''\]: expected words of at least one character"),
    ],
)
def test_what_is_out_of_range_is_named(root: Path, override: str, words_of_refusal: str) -> None:
    with pytest.raises(ValueError, match=f"^{words_of_refusal}") as caught:
        point(root, f"sampling.{override}")
    assert "\n" not in str(caught.value)


def test_a_bias_is_a_whole_number_or_not() -> None:
    found = compose_run(["sampling.logit_bias=[[5,-1.5],[6,2],[7,-inf]]"]).sampling
    assert found.logit_bias == [[5, -1.5], [6, 2], [7, float("-inf")]]
    assert sampling_params(found, byte_tokenizer()).logit_bias == ((5, -1.5), (6, 2), (7, float("-inf")))
