"""Keys and values of 4 bits: keys per channel over blocks of tokens, values per token, the newest tokens dense."""

from __future__ import annotations

from dataclasses import dataclass

from quant.kv.sealed_groups import SealedGroupsOptions


@dataclass
class KVInt4(SealedGroupsOptions):
    """`sealed_groups` with 4 bits."""

    key_bits: int = 4
    value_bits: int = 4
