"""A nested configuration as flat text parameters, whole: nothing is cut, nothing overwritten."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# What an MLflow store holds of one parameter; it would cut a longer value without a word.
MAX_PARAM_CHARS = 6000
MAX_NAME_CHARS = 250


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """A nested configuration as one text per leaf, keys joined with dots: `{"a": {"b": [1]}}` gives `a.b.0`.

    None, booleans and numbers are written as in JSON, empty mappings and sequences as `{}` and `[]`. A text
    above 6000 characters, which MLflow would cut, is split whole over `key.part_1`, `key.part_2` and so on.
    Raises ValueError for two leaves with one key and for a key that MLflow can't hold.
    """
    flat: dict[str, str] = {}
    for key, text in _split_long(_leaves("", config)):
        if key in flat:
            raise ValueError(f"two configuration values are both called {key!r}")
        if len(key) > MAX_NAME_CHARS:
            raise ValueError(f"configuration key above {MAX_NAME_CHARS} characters: {key[:60]}...")
        flat[key] = text
    return flat


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        node = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    dot = f"{prefix}." if prefix else ""
    if isinstance(node, Mapping) and (node or not prefix):
        for key, value in node.items():
            yield from _leaves(f"{dot}{key}", value)
    elif isinstance(node, Sequence) and not isinstance(node, (str, bytes)) and node:
        for index, value in enumerate(node):
            yield from _leaves(f"{dot}{index}", value)
    else:
        yield prefix, _leaf_text(node)


def _leaf_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return "[]"
    return json.dumps(value) if value is None or type(value) in (bool, int, float) else str(value)


def _split_long(leaves: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for key, text in leaves:
        if len(text) <= MAX_PARAM_CHARS:
            yield key, text
            continue
        for part, start in enumerate(range(0, len(text), MAX_PARAM_CHARS), start=1):
            yield f"{key}.part_{part}", text[start : start + MAX_PARAM_CHARS]
