"""Prompts from a file with one JSON object a line: `prompt` or `turns`, and optionally `category` and `id`.

The lines are parsed here rather than by the `datasets` library. Its JSON reader takes the schema from the
first block of the file, so a later line with other fields fails; it gives no usable line numbers;
it reads `*` and `[` in a path as a pattern; and unless it streams, it answers from a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.workloads.base import Prompt, WorkloadContext, WorkloadOptions, require_filled, take_prompts


@dataclass
class JsonlWorkload(WorkloadOptions):
    """The first `limit` records of the file at `path`; later lines are not read, blank lines are skipped.

    A record's id is its `id`, else its `question_id`, else its line number, counted from 1.
    """

    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_filled("workload.path", self.path, "a file with one JSON object a line")

    def load(self, context: WorkloadContext) -> list[Prompt]:
        file = Path(self.path).expanduser()
        if file.is_dir():
            raise ValueError(f"workload.path={self.path!r} is a folder: it must be a file with JSON lines")
        if not file.exists():
            raise ValueError(f"workload.path={self.path!r} does not exist: it must be a file with JSON lines")
        return take_prompts(_read_prompts(file), self.limit, f"workload.path={self.path!r}")


def _read_prompts(file: Path) -> Iterator[Prompt]:
    for number, line in enumerate(_read_lines(file), start=1):
        if line.strip():
            yield _parse_prompt(line, number, place=f"{file}, line {number}")


def _read_lines(file: Path) -> Iterator[str]:
    try:
        # utf-8-sig drops the byte order mark that some editors write.
        with file.open(encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _parse_prompt(line: str, number: int, place: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: broken JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(record).__name__}")
    prompt_id = _first_given(record, ("id", "question_id"), default=number)
    category = _first_given(record, ("category",), default="none")
    return Prompt(str(prompt_id), str(category), text=_prompt_text(record, place))


def _first_given(record: dict[str, Any], keys: tuple[str, ...], default: object) -> object:
    """A null counts as not given, as writers with a fixed schema fill absent fields with null."""
    return next((record[key] for key in keys if record.get(key) is not None), default)


def _prompt_text(record: dict[str, Any], place: str) -> str:
    text = record.get("prompt")
    turns = record.get("turns")
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if text is None:
        raise ValueError(
            f"{place}: neither 'prompt' nor 'turns' given (fields: {', '.join(record) or 'none'})"
        )
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: the prompt must be text that is not blank, got {text!r:.60}")
    return text
