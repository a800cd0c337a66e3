"""Prompts from a column of a Hugging Face dataset: a hub name, a local folder, or a `save_to_disk` folder.

Rows are streamed (hub, folder) or memory-mapped (`save_to_disk`), so a large dataset is not read for a few
prompts and no copy is cached: a changed local file is seen. No code of the dataset is run: `datasets` no
longer knows loading scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from experiments.workloads.base import Prompt, WorkloadContext, WorkloadOptions, require_filled, take_prompts

Row: TypeAlias = Mapping[str, Any]

# A split saved alone by `save_to_disk` may not know its name; datasets calls an unnamed split "train".
UNNAMED_SPLIT = "train"


@dataclass
class HfWorkload(WorkloadOptions):
    """The first `limit` rows of a split whose column `field` is not blank.

    `field` holds text, a list of texts (the first is used) or chat messages with `role` and `content` (the
    first user turn is used). `subset` picks a configuration of the dataset. A prompt's id is `<split>-<row>`,
    rows counted from 0; its category is the row's `category` column if it has one. Blank rows are skipped, as
    text corpora use them as separators. `section` is where the options stand in the configuration, and `for_a_file`
    what to choose for a file instead: both for messages.
    """

    section: ClassVar[str] = "workload"
    for_a_file: ClassVar[str] = "workload=jsonl workload.path=FILE for JSON lines"
    dataset: str = ""
    subset: str | None = None
    split: str = "train"
    field: str = "prompt"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_filled(f"{self.section}.dataset", self.dataset, "a dataset name or a local folder")
        require_filled(f"{self.section}.split", self.split, "a split of the dataset")
        require_filled(f"{self.section}.field", self.field, "a column of the dataset")

    def load(self, context: WorkloadContext) -> list[Prompt]:
        return take_prompts(self.prompts(), self.limit, self._describe())

    def _describe(self) -> str:
        name = "" if self.subset is None else f" {self.section}.subset={self.subset!r}"
        return f"{self.section}.dataset={self.dataset!r}{name} {self.section}.split={self.split!r}"

    def prompts(self) -> Iterator[Prompt]:
        """All rows, read as they are asked for."""
        for index, row in enumerate(self._read_rows()):
            if self.field not in row:
                known = ", ".join(row)
                raise ValueError(
                    f"{self._describe()} has no {self.section}.field={self.field!r}; its columns: {known}"
                )
            text = _first_text(row[self.field])
            if text is None:
                raise ValueError(
                    f"{self._describe()} {self.section}.field={self.field!r}, row {index}: expected text, a list "
                    f"of texts or chat messages with a user turn, got {row[self.field]!r:.60}"
                )
            if text.strip():
                yield Prompt(f"{self.split}-{index}", str(row.get("category") or "none"), text=text)

    def _read_rows(self) -> Iterator[Row]:
        with _one_line_errors(self._describe()):
            splits = _open_splits(self.dataset, self.subset, self.for_a_file)
        if self.split not in splits:
            known = ", ".join(splits)
            raise ValueError(
                f"{self.section}.dataset={self.dataset!r} has no split {self.split!r}; its splits: {known}"
            )
        with _one_line_errors(self._describe()):
            yield from splits[self.split]


@contextmanager
def _one_line_errors(source: str) -> Iterator[None]:
    try:
        yield
    # So broad because datasets lets errors of httpx, pyarrow, fsspec and others through; the cause is kept.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} cannot be read: {reason}") from error


def _open_splits(dataset: str, name: str | None, for_a_file: str) -> Mapping[str, Iterable[Row]]:
    folder = Path(dataset).expanduser()
    if folder.is_file():
        raise ValueError(f"it is a file; give its folder, or use {for_a_file}")
    if not folder.is_dir():
        if _looks_like_a_path(dataset):
            # Asking the hub for it would only end in a slow and misleading network error.
            raise ValueError("there is no such folder")
        return _stream(dataset, name)
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _open_saved(folder, name)
    return _stream(str(folder), name)


def _stream(dataset: str, name: str | None) -> Mapping[str, Iterable[Row]]:
    from datasets import load_dataset

    splits: Mapping[str, Iterable[Row]] = load_dataset(dataset, name, streaming=True)
    return splits


def _looks_like_a_path(dataset: str) -> bool:
    return dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1


def _open_saved(folder: Path, name: str | None) -> Mapping[str, Iterable[Row]]:
    from datasets import DatasetDict, load_from_disk

    if name is not None:
        raise ValueError(f"a dataset saved with save_to_disk has no configurations, got name {name!r}")
    saved = load_from_disk(str(folder))
    splits: Mapping[str, Iterable[Row]] = (
        saved if isinstance(saved, DatasetDict) else {str(saved.split or UNNAMED_SPLIT): saved}
    )
    return splits


def _first_text(value: object) -> str | None:
    """The text of a cell, or None if it holds none in a known form."""
    if isinstance(value, list):
        if value and all(isinstance(turn, Mapping) for turn in value):
            value = next((turn.get("content") for turn in value if turn.get("role") == "user"), None)
        else:
            value = value[0] if value else None
    return value if isinstance(value, str) else None
