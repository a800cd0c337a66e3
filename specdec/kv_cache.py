"""The KV cache: a buffer plus per-row lengths, and the lengths are the truth.

A token at position n of a row lives at slot n of that row's buffer, so there is no padding and nothing is ever
re-aligned. Rolling back is setting a smaller length: stale slots are never seen (a query sees positions up to
its own) and are overwritten later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specdec.attention import AttentionRule, grouped_attention
from specdec.columns import Columns


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. `capacity` is the number of positions a row can hold.

    `longest_pass` is the most tokens that a pass appends to a row before they are judged, that is all passes but those
    over a prompt; None where it isn't known.
    """

    num_layers: int
    num_slots: int
    num_kv_heads: int
    capacity: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    longest_pass: int | None = None

    def holds(self, other: CacheShape) -> bool:
        """Is it as large or larger, for heads and numbers of the same kind?"""
        sizes = ((shape.num_layers, shape.num_slots, shape.capacity) for shape in (self, other))
        kinds = ((shape.num_kv_heads, shape.head_dim, shape.dtype, shape.device) for shape in (self, other))
        ours, theirs = sizes
        return len(set(kinds)) == 1 and all(our >= their for our, their in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class PassLayout:
    """Which rows and positions one forward pass covers.

    Row b (slot `first_slot + b`) processes `counts[b]` tokens at positions `starts[b]...`; the pass is `width`
    tokens wide, and what lies behind a row's count is padding, directed to the spare slot `capacity`. With
    `is_fixed` nothing but masks and positions depends on the rows: all see the whole buffer, so that a pass rounds
    alike whatever they hold.
    """

    first_slot: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    capacity: int
    device: torch.device
    is_fixed: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.first_slot, self.first_slot + len(self.starts))

    @cached_property
    def extent(self) -> int:
        """Positions that the longest row sees, its new tokens included; all of the buffer where it is fixed."""
        if self.is_fixed:
            return self.capacity
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True)) or 1

    @cached_property
    def is_aligned(self) -> bool:
        """All rows write the same positions, without padding: one slice instead of scattered writes."""
        return not self.is_fixed and len(set(self.starts)) == 1 and set(self.counts) == {self.width}

    @cached_property
    def is_whole_prompt(self) -> bool:
        return self.is_aligned and self.starts[0] == 0

    @cached_property
    def sees_everything(self) -> bool:
        """One token per row, all at the last position of the extent: no mask is needed."""
        return self.is_aligned and self.width == 1

    @cached_property
    def positions(self) -> Tensor:
        """Where each token is written, int64 `[B, T]`; padding goes to the spare slot `capacity`."""
        steps = torch.arange(self.width)
        starts = torch.tensor(self.starts).unsqueeze(1)
        real = steps < torch.tensor(self.counts).unsqueeze(1)
        return torch.where(real, starts + steps, self.capacity).to(self.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """Positions for the model, int64 `[B, T]`: padding is clamped, so no table is read past its end."""
        return self.positions.clamp_max(self.capacity - 1)

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.rows.start, self.rows.stop, device=self.device).unsqueeze(1)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of `query [B, H, T, D]` over positions 0..extent - 1, `keys`, `values [B, KVH, extent, D]`."""
        return grouped_attention(query, keys, values, self, rule)

    def columns(
        self, positions: Tensor, since: Tensor, until: Tensor, tokens: slice = slice(None)
    ) -> Columns:
        """What the pass's tokens `tokens` attend to where a store arranges keys in another way; see `Columns`."""
        return Columns(self, tokens, positions, since, until)

    def additive_mask(self, dtype: torch.dtype, repeats: int, window: int | None = None) -> Tensor:
        """`[B, 1, repeats * T, extent]`: 0 where a query may look, -inf where not. Made once per pass and window."""
        key = (dtype, repeats, window)
        if key not in self._masks:
            slots = torch.arange(self.extent, device=self.device)
            own = self.positions.unsqueeze(-1)
            hidden = slots > own
            if window is not None:
                hidden = hidden | ((slots <= own - window) & (own < self.capacity))  # padding sees something
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[key] = mask.repeat(1, repeats, 1).unsqueeze(1)
        return self._masks[key]

    @cached_property
    def _masks(self) -> dict[tuple[torch.dtype, int, int | None], Tensor]:
        return {}


class KVStore(Protocol):
    """How keys and values are stored. Row and position are as in `PassLayout`.

    What a query sees of a token may depend on the two positions, but not on which passes wrote them, nor on tokens that
    were rejected: else speculation would not equal decoding token by token over the same store.
    """

    shape: CacheShape

    def write(self, layer: int, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        """Store `keys`, `values [B, KVH, T, D]` of one pass."""
        ...

    def attend(self, layer: int, query: Tensor, layout: PassLayout, rule: AttentionRule) -> Tensor:
        """Causal attention of `query [B, H, T, D]` over what the rows hold: `[B, T, H, D]`."""
        ...

    def commit(self, lengths: Sequence[int]) -> None:
        """The first `lengths[slot]` tokens of each slot are final: a store may pack them now, never earlier.

        Fewer than were final before say nothing new.
        """
        ...

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        ...

    def release(self, slot: int) -> None:
        """The slot is empty; what it holds next is another text."""
        ...

    def live_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes that hold tokens, scales included: also what a pass over these rows reads."""
        ...

    def allocated_bytes(self) -> int: ...

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token of a long text takes in the end, scales included."""
        ...


class KVCache:
    """A store plus the lengths of its slots: all committed tokens but the newest, after each step."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.lengths = [0] * store.shape.num_slots

    def layout(
        self, first_slot: int, counts: Sequence[int], width: int, is_fixed: bool = False
    ) -> PassLayout:
        """The pass that appends `counts[b]` tokens to slot `first_slot + b`.

        Raises ValueError when a row would grow beyond the capacity or the pass beyond the slots.
        """
        shape = self.store.shape
        starts = tuple(self.lengths[first_slot : first_slot + len(counts)])
        if len(starts) != len(counts):
            raise ValueError(
                f"{len(counts)} rows from slot {first_slot} on, but there are {shape.num_slots} slots"
            )
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if not 0 <= count <= width or start + count > shape.capacity:
                raise ValueError(
                    f"slot {first_slot + row} holds {start} tokens and gets {count} in a pass of {width}, "
                    f"but its capacity is {shape.capacity}"
                )
        return PassLayout(first_slot, starts, tuple(counts), width, shape.capacity, shape.device, is_fixed)

    def advance(self, layout: PassLayout) -> None:
        """The tokens of a pass are in the cache, though not yet final."""
        self.lengths[layout.rows] = [s + c for s, c in zip(layout.starts, layout.counts, strict=True)]

    def roll_back(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[slot]` tokens of slots 0, 1, ...; copies nothing.

        Raises ValueError when a length exceeds what the slot holds.
        """
        for slot, length in enumerate(lengths):
            if not 0 <= length <= self.lengths[slot]:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} tokens, can't be rolled back to {length}"
                )
        self.lengths[: len(lengths)] = lengths

    def commit(self) -> None:
        """All that the slots hold now is final."""
        self.store.commit(self.lengths)

    def commit_slot(self, slot: int) -> None:
        """All that one slot holds now is final."""
        self.store.commit([length if other == slot else 0 for other, length in enumerate(self.lengths)])

    def move(self, source: int, destination: int) -> None:
        self.store.move(source, destination, self.lengths[source])
        self.lengths[destination] = self.lengths[source]
        self.release(source)

    def release(self, slot: int) -> None:
        self.store.release(slot)
        self.lengths[slot] = 0

    @property
    def live_bytes(self) -> int:
        return self.store.live_bytes(self.lengths)

    @property
    def num_layers(self) -> int:
        return self.store.shape.num_layers

    def view(self, num_layers: int | None = None) -> CacheView:
        """For a draft model that goes on from this cache; it uses `num_layers` of the layers, by default all."""
        return CacheView(self, num_layers or self.num_layers)


class CacheView(KVCache):
    """The same buffer, read as far as its owner holds tokens, and written behind: nothing of it is ever final.

    A draft model that shares the target's layers needs no cache and no prefill of its own. What it writes, the
    target's next pass overwrites, since that covers every draft token (Zhang et al. 2023, "Draft & Verify").
    """

    def __init__(self, owner: KVCache, num_layers: int) -> None:
        self.store = owner.store
        self._owner = owner
        self._num_layers = num_layers
        self._ahead = [0] * owner.store.shape.num_slots  # tokens behind those of the owner

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [held + ahead for held, ahead in zip(self._owner.lengths, self._ahead, strict=True)]

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def advance(self, layout: PassLayout) -> None:
        ahead = zip(self._ahead[layout.rows], layout.counts, strict=True)
        self._ahead[layout.rows] = [before + count for before, count in ahead]

    def roll_back(self, lengths: Sequence[int]) -> None:
        """Forget what lies behind `lengths[slot]`; the owner's tokens can't be forgotten here."""
        for slot, length in enumerate(lengths):
            self._ahead[slot] = max(0, min(self._ahead[slot], length - self._owner.lengths[slot]))

    def commit(self) -> None:
        pass  # the owner's to say

    def commit_slot(self, slot: int) -> None:
        pass  # the owner's to say

    def move(self, source: int, destination: int) -> None:
        self.release(destination)  # the owner moves what it holds, and no more
        self.release(source)

    def release(self, slot: int) -> None:
        self._ahead[slot] = 0
