"""Keys quantized per channel over sealed blocks of tokens, values per token; the newest and first tokens stay dense.

After KIVI (Liu et al. 2024, arXiv 2402.02750): some channels of keys are large in every token, so that a scale per
channel costs less than one per token. A block can be quantized only when all its tokens are there, and is once: when
they are committed, with a tail of dense tokens behind them. Dense first tokens (sinks: Xiao et al. 2023, arXiv
2309.17453) keep a huge key there out of the scales.

Which form a query sees is a function of positions alone: behind `sink` tokens, the query at position n sees a block
packed when at least `tail` tokens lie between the block and the query, else dense. Decoding token by token, a verify
pass, a chunk and a whole prompt therefore compute the same. In a pass that straddles such a border its first queries
see a block dense and its last ones packed: the columns of attention hold it in both forms, the packed one made for the
pass as `commit` will make it. With a tail of a whole verify pass all tokens of that block were committed before; a
rejected token never touches a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.kv.base import Columns, KVOptions, Layout, PackedBuffer, Shape

# Queries of a long prompt attend in parts of so many, each to the columns that it can see.
PART = 64
NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Seal:
    """How many tokens behind the sink are packed. Positions in this file are counted from behind the sink."""

    sink: int
    block: int
    tail: int

    def packed(self, position: int) -> int:
        """Tokens that a query at `position` sees packed, or that are stored so when as many are committed."""
        return max(0, (position - self.tail) // self.block * self.block)

    def first_packed(self, positions: Tensor) -> Tensor:
        """The first query that sees the tokens at `positions` packed."""
        return (positions // self.block + 1) * self.block + self.tail


@dataclass(frozen=True)
class Part:
    """Some queries of a pass: they attend to `dense` tokens, in `slots` of the dense buffer, then to `packed` ones.

    The slots are those of all rows, or of each one, `[B, dense]`.
    """

    tokens: slice
    slots: list[slice] | Tensor
    dense: int
    packed: int
    columns: Columns


@dataclass(frozen=True)
class Pass:
    """A pass at work, for all layers: where its tokens go in the dense buffer, `[B, T]` or a slice for all rows."""

    layout: Layout
    slots: slice | Tensor
    parts: list[Part]


class SealedGroupsStore:
    """Per layer `[S, KVH]` times: blocks of packed tokens, and a dense buffer of sink, ring and one spare slot.

    The token at position n behind the sink is in slot n mod R of the ring, until it is packed. The ring is as long as
    decoding needs; a long prompt makes it grow until the prompt is committed.
    """

    def __init__(self, shape: Shape, seal: Seal, key_bits: int, value_bits: int, group: int) -> None:
        self.shape: Any = shape
        self._seal = seal
        layers, slots, heads, dim = shape.num_layers, shape.num_slots, shape.num_kv_heads, shape.head_dim
        lead = (layers, slots, heads, self._stored(shape.capacity) // seal.block)
        self._group = (dim // group, group)
        self._keys = PackedBuffer(lead, (seal.block, dim), -2, key_bits, shape.dtype, shape.device)
        self._values = PackedBuffer(
            lead, (seal.block, *self._group), -1, value_bits, shape.dtype, shape.device
        )
        longest = shape.longest_pass or seal.tail
        self._needed = max(1, min(shape.capacity - seal.sink, seal.tail + seal.block - 1 + longest))
        self._ring = self._needed
        self._dense = self._new_dense(self._ring)
        self._packed = [0] * slots  # tokens stored packed
        self._ends = [0] * slots  # the dense tokens of a slot lie from the packed ones to here
        self._pass: Pass | None = None

    # Writing

    def write(self, layer: int, layout: Layout, keys: Tensor, values: Tensor) -> None:
        slots = self._pass_of(layout).slots
        for buffer, new in zip(self._dense[:, layer], (keys, values), strict=True):
            if isinstance(slots, slice):
                buffer[layout.rows, :, slots] = new
            else:
                buffer[layout.row_index, :, slots] = new.transpose(1, 2)

    def commit(self, lengths: Sequence[int]) -> None:
        for slot, length in enumerate(lengths):
            packed = self._stored(length)
            if packed > self._packed[slot]:
                self._pack(slot, self._packed[slot], packed)
                self._packed[slot] = packed
        self._pass = None
        held = max(end - packed for end, packed in zip(self._ends, self._packed, strict=True))
        if self._ring > max(self._needed, held):
            self._resize(max(self._needed, held))

    def move(self, source: int, destination: int, length: int) -> None:
        blocks = slice(self._packed[source] // self._seal.block)
        for buffer in (self._keys, self._values):
            buffer.copy(
                (slice(None), source, slice(None), blocks), (slice(None), destination, slice(None), blocks)
            )
        self._dense[:, :, destination] = self._dense[:, :, source]
        self._packed[destination], self._ends[destination] = self._packed[source], self._ends[source]
        self._pass = None

    def release(self, slot: int) -> None:
        self._packed[slot] = self._ends[slot] = 0
        self._pass = None

    def _stored(self, length: int) -> int:
        """Tokens behind the sink that are stored packed when the first `length` of a row are final."""
        # As the next query sees them; a full row has none.
        return self._seal.packed(min(length, self.shape.capacity - 1) - self._seal.sink)

    def _pack(self, slot: int, start: int, stop: int) -> None:
        block = self._seal.block
        blocks = slice(start // block, stop // block)
        keys, values = self._blocks(self._dense[:, :, slot], start, stop)
        self._keys.write((slice(None), slot, slice(None), blocks), keys)
        self._values.write((slice(None), slot, slice(None), blocks), values.unflatten(-1, self._group))

    def _blocks(self, dense: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Dense keys and values at the given positions, by blocks: of `[2, ..., slots, D]`."""
        slots = torch.arange(start, stop, device=dense.device) % self._ring + self._seal.sink
        keys, values = dense[..., slots, :].unflatten(-2, (-1, self._seal.block))
        return keys, values

    # The ring

    def _new_dense(self, ring: int) -> Tensor:
        shape, slots = self.shape, self._seal.sink + ring + 1
        size = (2, shape.num_layers, shape.num_slots, shape.num_kv_heads, slots, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _resize(self, ring: int) -> None:
        sink, old, new = self._seal.sink, self._dense, self._new_dense(ring)
        new[..., :sink, :] = old[..., :sink, :]
        for slot, (packed, end) in enumerate(zip(self._packed, self._ends, strict=True)):
            held = torch.arange(packed, max(packed, end), device=old.device)
            new[:, :, slot, :, sink + held % ring] = old[:, :, slot, :, sink + held % self._ring]
        self._dense, self._ring = new, ring

    # Attention

    def attend(self, layer: int, query: Tensor, layout: Layout, rule: Any) -> Tensor:
        parts = self._pass_of(layout).parts
        most_packed, most_dense = max(part.packed for part in parts), max(part.dense for part in parts)
        held = self._dense[:, layer]  # [2, S, KVH, slots, D]
        size = (2, len(layout.starts), held.shape[2], most_dense + most_packed, held.shape[-1])
        columns = held.new_empty(size)
        if most_packed:
            self._read_packed(layer, layout, columns[..., most_dense:, :])
        outputs = []
        for part in parts:
            # Right before the packed columns, which all parts share.
            seen = columns[..., most_dense - part.dense : most_dense + part.packed, :]
            place = 0
            if isinstance(part.slots, Tensor):
                taken = held[:, layout.row_index, :, part.slots]  # [B, dense, 2, KVH, D]
                seen[..., : part.dense, :] = taken.permute(2, 0, 3, 1, 4)
            elif len(part.slots) == 1 and not part.packed:
                seen = held[:, layout.rows, :, part.slots[0]]
            else:
                for slots in part.slots:
                    number = slots.stop - slots.start
                    seen[..., place : place + number, :] = held[:, layout.rows, :, slots]
                    place += number
            keys, values = seen
            outputs.append(part.columns.attend(query[:, :, part.tokens], keys, values, rule))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    def _read_packed(self, layer: int, layout: Layout, out: Tensor) -> None:
        """Packed tokens of the pass's rows into `out [2, B, KVH, N, D]`, also those that this pass will have packed."""
        block = self._seal.block
        keys, values = out.unflatten(-2, (-1, block))
        seen = (layer, layout.rows, slice(None), slice(out.shape[-2] // block))
        self._keys.read(seen, out=keys)
        self._values.read(seen, out=values.unflatten(-1, self._group))
        for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            slot = layout.rows.start + row
            stored = self._packed[slot]
            packed = self._seal.packed(start + count - 1 - self._seal.sink)
            if count and packed > stored:
                blocks = slice(stored // block, packed // block)
                new_keys, new_values = self._blocks(self._dense[:, layer, slot], stored, packed)
                keys[row, :, blocks] = self._keys.as_read(new_keys)
                grouped = new_values.unflatten(-1, self._group)
                values[row, :, blocks] = self._values.as_read(grouped).flatten(-2)

    def _pass_of(self, layout: Layout) -> Pass:
        if self._pass is None or self._pass.layout is not layout:
            self._make_room(layout)
            starts = range(0, layout.width, PART)
            parts = [self._part(layout, slice(start, min(start + PART, layout.width))) for start in starts]
            self._pass = Pass(layout, self._slots_of(layout), parts)
        return self._pass

    def _make_room(self, layout: Layout) -> None:
        for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            slot = layout.rows.start + row
            if count and self._stored(start) < self._packed[slot]:
                raise ValueError(
                    f"slot {slot} goes on behind {start} tokens, but more were committed, and some of them packed"
                )
            if count:
                self._ends[slot] = max(0, start + count - self._seal.sink)
        needed = max(end - packed for end, packed in zip(self._ends, self._packed, strict=True))
        if needed > self._ring:
            self._resize(needed)

    def _slots_of(self, layout: Layout) -> slice | Tensor:
        """Where in the dense buffer the pass's tokens go: a slice, or `[B, T]`."""
        sink, ring, start = self._seal.sink, self._ring, layout.starts[0]
        turn = max(0, start - sink) // ring
        if layout.is_aligned and turn == max(0, start + layout.width - 1 - sink) // ring:
            return slice(start - turn * ring, start - turn * ring + layout.width)
        positions = layout.positions
        behind = positions - sink
        slots = torch.where(behind < 0, positions, sink + behind % ring)
        return slots.masked_fill_(positions == self.shape.capacity, sink + ring)

    def _part(self, layout: Layout, tokens: slice) -> Part:
        slots, dense, packed = self._seen(layout, tokens)
        sink, blocks = self._seal.sink, torch.arange(packed, device=dense.device)
        until = torch.where(dense < 0, NEVER, self._seal.first_packed(dense) + sink)
        since = torch.cat([torch.zeros_like(dense[0]), self._seal.first_packed(blocks) + sink])
        blocks = blocks.expand(len(dense), -1)
        columns = layout.columns(
            torch.cat([dense, blocks], 1) + sink,
            since.unsqueeze(0),
            torch.cat([until, torch.full_like(blocks, NEVER)], 1),
            tokens,
        )
        return Part(tokens, slots, dense.shape[1], packed, columns)

    def _seen(self, layout: Layout, tokens: slice) -> tuple[list[slice] | Tensor, Tensor, int]:
        """What some queries see between them: slots of the dense buffer, the positions there, and how many packed.

        But for a fixed layout both are in the order of positions, so that the order of sums is a function of the
        layout alone.
        """
        sink, ring = self._seal.sink, self._ring
        if layout.is_fixed:
            return [slice(0, sink + ring)], self._whole_ring(layout), self._stored(self.shape.capacity)
        seen = {
            row: (self._seal.packed(start + tokens.start - sink), start + min(count, tokens.stop) - sink)
            for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True))
            if count > tokens.start
        } or {0: (0, 1 - sink)}  # where there is padding only, it sees the first token
        most = max(stop for _, stop in seen.values())
        num_sink, num_ring = min(sink, sink + most), max(0, *(stop - first for first, stop in seen.values()))
        lowest = min(first for first, _ in seen.values())
        firsts = [seen.get(row, (lowest, 0))[0] for row in range(len(layout.starts))]
        positions = torch.tensor(firsts, device=self.shape.device).unsqueeze(1) + torch.arange(
            -num_sink, num_ring, device=self.shape.device
        )
        positions[:, :num_sink] = torch.arange(-sink, num_sink - sink, device=self.shape.device)
        packed = max(self._seal.packed(stop - 1) for _, stop in seen.values())
        if len(set(firsts)) == 1:
            return self._slices(num_sink, lowest, num_ring), positions, packed
        return torch.where(positions < 0, positions, positions % ring) + sink, positions, packed

    def _whole_ring(self, layout: Layout) -> Tensor:
        """Positions in the slots of sink and ring, `[B, slots]`."""
        device = self.shape.device
        slots = torch.arange(-self._seal.sink, self._ring, device=device)
        # A slot of the ring holds the one position of its kind among those that are not packed yet.
        held = torch.tensor(self._packed[layout.rows], device=device).unsqueeze(1)
        return torch.where(slots < 0, slots, held + (slots - held) % self._ring)

    def _slices(self, num_sink: int, first: int, number: int) -> list[slice]:
        """Slots of the first sink tokens and of `number` positions of the ring from `first` on."""
        sink, start = self._seal.sink, first % self._ring
        before_the_end = min(number, self._ring - start)
        found = [
            slice(0, num_sink),
            slice(sink + start, sink + start + before_the_end),
            slice(sink, sink + number - before_the_end),
        ]
        if not start and num_sink == sink:  # side by side
            found = [slice(0, sink + before_the_end)]
        return [slots for slots in found if slots.stop > slots.start]

    # Bytes

    def live_bytes(self, lengths: Sequence[int]) -> int:
        total = 0
        for length in lengths:
            packed = self._stored(length)
            total += packed // self._seal.block * self._block_bytes + (length - packed) * self._dense_bytes
        return total

    def allocated_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes + self._dense.nbytes

    @property
    def bytes_per_token(self) -> float:
        return self._block_bytes / self._seal.block

    @property
    def _block_bytes(self) -> int:
        heads = self.shape.num_layers * self.shape.num_kv_heads
        return heads * (self._keys.unit_bytes + self._values.unit_bytes)

    @property
    def _dense_bytes(self) -> int:
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


@dataclass
class SealedGroupsOptions(KVOptions):
    """`key_bits`, `value_bits`: 2, 4 or 8. `group`: numbers of a value that share a scale; 0: all of a head.

    `block`: tokens that share the scales of their keys. `tail`: so many of the newest tokens are dense at least; a
    verify pass must fit. `sink`: so many of the first tokens are dense for ever.
    """

    key_bits: int = 4
    value_bits: int = 4
    block: int = 32
    tail: int = 32
    sink: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, least in (("block", self.block, 1), ("tail", self.tail, 1), ("sink", self.sink, 0)):
            if value < least:
                raise ValueError(f"kv.{name}={value}: expected at least {least}")

    def check(self, shape: Shape) -> None:
        self.group_of(shape.head_dim, self.value_bits)
        if shape.head_dim * self.key_bits % 8:
            raise ValueError(
                f"kv.key_bits={self.key_bits}: a head of {shape.head_dim} numbers does not fill whole bytes; "
                "choose more bits or kv=dense"
            )
        if shape.longest_pass is not None and shape.longest_pass > self.tail:
            raise ValueError(
                f"kv.tail={self.tail}: the dense tail has to hold a pass, here of up to {shape.longest_pass} tokens "
                f"(draft_length.max + 1, or exactness.pass_tokens): at least {shape.longest_pass}"
            )

    def build(self, shape: Shape) -> SealedGroupsStore:
        self.check(shape)
        group = self.group_of(shape.head_dim, self.value_bits)
        seal = Seal(min(self.sink, shape.capacity), self.block, self.tail)
        return SealedGroupsStore(shape, seal, self.key_bits, self.value_bits, group)
