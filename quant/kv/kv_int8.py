"""Keys and values of 8 bits, a scale per token."""

from __future__ import annotations

from dataclasses import dataclass

from quant.kv.per_token import PerTokenOptions


@dataclass
class KVInt8(PerTokenOptions):
    """`per_token` with its defaults."""
