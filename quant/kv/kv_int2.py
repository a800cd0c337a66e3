"""Keys and values of 2 bits: keys per channel over blocks of tokens, values per token, the newest tokens dense."""

from __future__ import annotations

from dataclasses import dataclass

from quant.kv.sealed_groups import SealedGroupsOptions


@dataclass
class KVInt2(SealedGroupsOptions):
    """`sealed_groups` with 2 bits."""

    key_bits: int = 2
    value_bits: int = 2
