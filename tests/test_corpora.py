"""The corpus: the same pieces each time, as many tokens as asked for, and one line for what can't be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiments.command_line import explain
from experiments.config import FidelityConfig, compose_run
from experiments.corpora import GIVEN_TOKENS, SCORED_TOKENS, check_corpus, corpus_texts
from experiments.teacher_forcing import ForcedText

LONG = 4096
WORDS = [f"w{number}" for number in range(1000)]


def tokenizer_of(words: list[str], *, has_opening: bool = False) -> PreTrainedTokenizerBase:
    """A token per word, in the order given; `<s>` stands before a text where there is an opening."""
    vocabulary = {word: index for index, word in enumerate(["?", "<s>", *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_opening:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="?")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tokenizer_of(WORDS)


def file_of(folder: Path, words: list[str], per_line: int = 7) -> FidelityConfig:
    lines = [" ".join(words[start : start + per_line]) for start in range(0, len(words), per_line)]
    (folder / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    return FidelityConfig(corpus=str(folder / "corpus.txt"), corpus_tokens=LONG)


def read_ids(texts: list[ForcedText]) -> list[int]:
    return [token for text in texts for token in text.token_ids]


def test_pieces_follow_each_other_and_nothing_is_read_twice(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = corpus_texts(file_of(tmp_path, WORDS), tokenizer, LONG)
    assert read_ids(texts) == [index + 2 for index in range(1000)]
    assert [text.num_given for text in texts] == [GIVEN_TOKENS] * 4
    assert [text.num_scored for text in texts] == [SCORED_TOKENS] * 3 + [1000 - 3 * 288 - 32]


@pytest.mark.parametrize("wanted", [1, 100, 256, 300])
def test_so_many_tokens_are_scored_as_asked_for(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, wanted: int
) -> None:
    config = file_of(tmp_path, WORDS)
    config.corpus_tokens = wanted
    assert sum(text.num_scored for text in corpus_texts(config, tokenizer, LONG)) == wanted


@pytest.mark.parametrize("context", [2, 3, 40, 128])
def test_pieces_fit_the_context(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    texts = corpus_texts(file_of(tmp_path, WORDS), tokenizer, context)
    assert max(len(text.token_ids) for text in texts) <= context
    assert read_ids(texts)[:20] == list(range(2, 22))


def test_a_tail_that_nothing_can_be_scored_of_is_left(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = corpus_texts(file_of(tmp_path, WORDS[: 288 + 32]), tokenizer, LONG)
    assert [len(text.token_ids) for text in texts] == [288]
    (short,) = corpus_texts(file_of(tmp_path, WORDS[:5]), tokenizer, LONG)
    assert (short.num_given, short.num_scored) == (4, 1)


def test_each_piece_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    opening = tokenizer_of(WORDS, has_opening=True)
    texts = corpus_texts(file_of(tmp_path, WORDS), opening, 40)
    assert {text.token_ids[0] for text in texts} == {1}
    assert max(len(text.token_ids) for text in texts) == 40
    assert [token for text in texts for token in text.token_ids[1:]][:30] == list(range(2, 32))


def test_the_default_is_python_s_own_prose_the_same_each_time() -> None:
    from pydoc_data.topics import topics

    words = sorted({word for text in topics.values() for word in text.split()})
    config = FidelityConfig(corpus_tokens=600)
    one, other = (corpus_texts(config, tokenizer_of(words), LONG) for _ in range(2))
    assert one == other
    assert sum(text.num_scored for text in one) == 600
    text = str(tokenizer_of(words).decode(read_ids(one)))
    assert "?" not in text.split()
    assert "::=" not in text
    assert "*****" not in text  # headings are underlined so
    assert sum(len(word) > 3 and word.isalpha() for word in text.split()) > 250


def test_a_dataset_is_read_row_by_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"body": " ".join(WORDS[:20])}, {"body": ""}, {"body": " ".join(WORDS[20:50])}, {"other": 1}]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = FidelityConfig(corpus="hf", dataset=str(tmp_path), split="test", field="body", corpus_tokens=10)
    (text,) = corpus_texts(config, tokenizer, LONG)
    assert text == ForcedText(tuple(range(2, 44)), 32)
    config.split = "dev"
    with pytest.raises(ValueError, match=r"fidelity\.dataset=.* has no split 'dev'; its splits: test"):
        corpus_texts(config, tokenizer, LONG)
    config.split, config.field = "test", "txt"
    with pytest.raises(ValueError, match=r"has no fidelity\.field='txt'; its columns: body"):
        corpus_texts(config, tokenizer, LONG)
    config.dataset = str(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match=r"fidelity\.dataset=.*it is a file; .* fidelity\.corpus=FILE"):
        corpus_texts(config, tokenizer, LONG)


def test_none_is_none(tokenizer: PreTrainedTokenizerBase) -> None:
    assert corpus_texts(FidelityConfig(corpus="none"), tokenizer, LONG) == []


def test_a_source_without_two_tokens_is_one_line(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for words in ([], WORDS[:1]):
        with pytest.raises(ValueError, match=r"fidelity\.corpus=.*: holds no text of two tokens or more"):
            corpus_texts(file_of(tmp_path, words), tokenizer, LONG)
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(ValueError, match=r"fidelity\.corpus=.*latin\.txt: not UTF-8 text"):
        corpus_texts(FidelityConfig(corpus=str(tmp_path / "latin.txt")), tokenizer, LONG)


def test_a_file_that_is_not_there_is_known_at_once(tmp_path: Path) -> None:
    for name in ("topics", "none"):
        check_corpus(FidelityConfig(corpus=name))
    check_corpus(file_of(tmp_path, WORDS))
    for name in (str(tmp_path), str(tmp_path / "missing.txt"), "topic"):
        with pytest.raises(ValueError, match="expected topics, none, hf, or a file of text"):
            check_corpus(FidelityConfig(corpus=name))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["fidelity.chunk=0"], "fidelity.chunk=0: expected at least 1"),
        (["fidelity.text_tokens=-1"], "fidelity.text_tokens=-1: expected at least 0"),
        (["fidelity.corpus_tokens=0"], "fidelity.corpus_tokens=0: expected at least 1"),
        (["fidelity.corpus=' '"], "fidelity.corpus=' ': expected topics, none, hf, or a text file"),
        (["fidelity.corpus=hf"], "fidelity.corpus=hf needs fidelity.dataset"),
        (["fidelity.dataset=x"], "fidelity.dataset=x is for fidelity.corpus=hf"),
        (["fidelity.split=test"], "fidelity.split=test is for fidelity.corpus=hf"),
        (["fidelity.corpus=none", "fidelity.subset=x"], "fidelity.subset=x is for fidelity.corpus=hf"),
        (["fidelity.size=3"], "unknown key 'fidelity.size'"),
        (["fidelity.chunk=wide"], "wide"),
    ],
)
def test_a_bad_setting_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        compose_run(overrides)
    assert words in explain(caught.value)
