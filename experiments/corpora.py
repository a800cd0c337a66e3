"""Text that no model of a run wrote, to compare laws on: what Python ships, a file, or a Hugging Face dataset.

The default is the prose of `pydoc_data.topics`, which `help()` shows: there on every machine without a download. Its
wording follows the Python version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from experiments.config import FidelityConfig
from experiments.teacher_forcing import ForcedText
from experiments.workloads.hf import HfWorkload

# Of each piece: context for its first laws, then the positions at which they are compared.
GIVEN_TOKENS = 32
SCORED_TOKENS = 256
MIN_WORDS = 12  # shorter paragraphs of Python's help are headings


@dataclass
class HfCorpus(HfWorkload):
    """The rows of a dataset, in order."""

    section: ClassVar[str] = "fidelity"
    for_a_file: ClassVar[str] = "fidelity.corpus=FILE"


def corpus_texts(
    config: FidelityConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> list[ForcedText]:
    """Consecutive pieces of the corpus with `corpus_tokens` scored tokens together, fewer where it ends earlier.

    The same ones for the same settings. Each begins as the tokenizer begins a text. Raises ValueError, in one line, for
    a source that can't be read, or holds fewer than two tokens.
    """
    if config.corpus == "none":
        return []
    opening = _opening(tokenizer)
    tokens = chain.from_iterable(
        tokenizer.encode(f"{paragraph}\n\n", add_special_tokens=False) for paragraph in _paragraphs(config)
    )
    # At least one token behind the opening is given, and one scored.
    room = max(2, context_length - len(opening))
    scored = min(SCORED_TOKENS, max(1, room // 2))
    given = min(GIVEN_TOKENS, room - scored)
    texts: list[ForcedText] = []
    left = config.corpus_tokens
    while left > 0:
        piece = tuple(islice(tokens, given + min(scored, left)))
        if len(piece) <= given and (texts or len(piece) < 2):
            break
        num_given = min(given, len(piece) - 1)
        texts.append(ForcedText((*opening, *piece), len(opening) + num_given))
        left -= texts[-1].num_scored
    if not texts:
        raise ValueError(f"fidelity.corpus={config.corpus}: holds no text of two tokens or more")
    return texts


def check_corpus(config: FidelityConfig) -> None:
    """Raises ValueError for a file that isn't there: also where nothing would have read it."""
    if config.corpus not in ("none", "topics", "hf") and not Path(config.corpus).expanduser().is_file():
        raise ValueError(f"fidelity.corpus={config.corpus}: expected topics, none, hf, or a file of text")


def _opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts before every text: a first token, or nothing."""
    added: list[int] = tokenizer.encode("", add_special_tokens=True)
    return tuple(added[:1]) if added and added[0] == tokenizer.bos_token_id else ()


def _paragraphs(config: FidelityConfig) -> Iterator[str]:
    if config.corpus == "topics":
        yield from _topics()
    elif config.corpus == "hf":
        rows = HfCorpus(
            dataset=config.dataset, subset=config.subset, split=config.split, field=config.field, limit=1
        )
        yield from (str(row.text) for row in rows.prompts())
    else:
        yield from _of_lines(_file_lines(config.corpus))


def _topics() -> Iterator[str]:
    """The prose of Python's help, topic by topic: no headings, grammar, code or lists."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        for paragraph in _of_lines(topics[name].splitlines()):
            is_indented = paragraph[0].isspace() or "\n " in paragraph
            if not is_indented and len(paragraph.split()) >= MIN_WORDS and "::=" not in paragraph:
                yield paragraph


def _of_lines(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs: lines up to a blank one."""
    found: list[str] = []
    for line in chain(lines, [""]):
        if line.strip():
            found.append(line.rstrip("\n"))
        elif found:
            yield "\n".join(found)
            found = []


def _file_lines(path: str) -> Iterator[str]:
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"fidelity.corpus={path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"fidelity.corpus={path}: can't be read: {error}") from error
