"""How many sequences fit beside the weights, by how their keys and values are stored: computed, then allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.findings import Findings, Rows
from experiments.articles.lab import BEYOND_CONTEXT, Lab, LimitError, along
from experiments.articles.resident import resident_kv_bytes
from experiments.articles.study import ArticleOptions
from experiments.bench import MIB
from experiments.config import check
from experiments.plots.curves import Line, Panel, curves
from experiments.theory import batch_capacity, kv_bytes_per_token
from quant.footprint import stored_bytes
from specdec.hf_adapter import HFAdapter

GIB = 2**30
# Resident bytes may differ from stored ones by this: pages are whole, and so are the allocator's blocks.
ALIKE_FRAC = 0.03
FORMULA = "{:g} bits a value, by the formula"


@dataclass
class BatchCapacityOptions(ArticleOptions):
    """`memory_gib`: for weights and caches; null: a power of two that holds the weights twice. `tokens`: of a sequence.

    `kv`: stores beside the run's own. No more is allocated than `memory_gib`, nor than is free.
    """

    title: ClassVar[str] = "How many sequences fit into memory"
    stores: ClassVar[str] = "kv"

    memory_gib: float | None = None
    tokens: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    kv: list[str] = field(default_factory=lambda: ["dense", "kv_int8", "kv_int4"])

    def __post_init__(self) -> None:
        is_right = self.memory_gib is None or 0 < self.memory_gib < math.inf
        check(is_right, "experiment.memory_gib", self.memory_gib, "a number above 0, or null")
        self.check_at_least(tokens=2)

    def measure(self, lab: Lab) -> Findings:
        memory = Memory.of(stored_bytes(lab.model), self.memory_gib)
        own = lab.arm.kv.name
        found: dict[str, dict[int, Capacity]] = {}
        limits: dict[str, str] = {}
        for name, store in lab.stores(self.kv).items():
            found[name], missing = capacities(store, self.tokens, memory)
            limits |= {f"{name} {where}": why for where, why in missing.items()}
        title = headline(found, own, memory)
        heading = (
            f"Sequences in {memory.gib:g} GiB, of which the weights take {memory.weights_bytes / GIB:.2f}"
        )
        return Findings(
            title,
            metrics={
                f"batch_capacity/sequences_n.{name}": by_tokens[typical(by_tokens)].sequences
                for name, by_tokens in found.items()
            },
            tables={heading: _table(found)},
            figures=_figures(title, found, lab, memory),
            notes=[
                "predicted: (memory - weights) / what the store says a sequence takes, with scales and spare slots; so "
                "many were allocated, written and counted, not one more",
                *_off_notes(found),
                f"another memory: experiment.memory_gib={2 * memory.gib:g}",
            ],
            limits=limits,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes for weights and caches together."""

    total_bytes: int
    weights_bytes: int

    @staticmethod
    def of(weights_bytes: int, memory_gib: float | None) -> Memory:
        """By default the power of two of GiB, at least 1, that holds the weights twice."""
        if memory_gib is None:
            memory_gib = 2.0 ** max(0, math.ceil(math.log2(2 * weights_bytes / GIB)))
        return Memory(int(GIB * memory_gib), weights_bytes)

    @property
    def gib(self) -> float:
        return self.total_bytes / GIB

    @property
    def room_bytes(self) -> int:
        return max(0, self.total_bytes - self.weights_bytes)


@dataclass(frozen=True)
class Capacity:
    """`predicted` sequences of `row_bytes` fit. As many took `resident_bytes` once written; None: not allocated.

    From `ridge_rows` of them on arithmetic, not memory, limits a step; infinite where it never does.
    """

    predicted: int
    row_bytes: int
    room_bytes: int
    ridge_rows: float = math.inf
    resident_bytes: int | None = None

    @property
    def sequences(self) -> int:
        """How many fit by what they really took; as predicted where none were allocated."""
        if not self.resident_bytes:
            return self.predicted
        return int(self.room_bytes * self.predicted / self.resident_bytes)

    @property
    def resident_by_stored(self) -> float | None:
        return None if not self.resident_bytes else self.resident_bytes / (self.predicted * self.row_bytes)


def capacities(lab: Lab, tokens: Sequence[int], memory: Memory) -> tuple[dict[int, Capacity], dict[str, str]]:
    """By tokens of a sequence; where there is no memory to check a prediction, it stays one. Raises LimitError."""

    def predict(length: int) -> Capacity:
        if length > lab.context:
            raise LimitError(BEYOND_CONTEXT)
        row_bytes = lab.kv_bytes(1, length)
        return Capacity(
            memory.room_bytes // row_bytes, row_bytes, memory.room_bytes, rows_to_ridge(lab, length)
        )

    found, missing = along(tokens, "tokens", predict)
    for length, one in found.items():
        try:
            if one.predicted:
                held_bytes = resident_kv_bytes(lab, one.predicted, length)
                found[length] = replace(one, resident_bytes=held_bytes)
        except LimitError as limit:
            missing[f"tokens {length}"] = f"predicted only, {limit}"
    return found, missing


def rows_to_ridge(lab: Lab, tokens: int) -> float:
    """Rows of `tokens` from which on arithmetic, not memory, limits a step; infinite where it never does."""
    one, two = (lab.floors(rows, 1, tokens - 1) for rows in (1, 2))
    row_ms, more_compute_ms = two.memory_ms - one.memory_ms, one.compute_ms - (two.memory_ms - one.memory_ms)
    return (one.memory_ms - row_ms) / more_compute_ms if more_compute_ms > 0 else math.inf


def typical(by_tokens: Mapping[int, Capacity]) -> int:
    """The length that is spoken of: the middle one."""
    return sorted(by_tokens)[len(by_tokens) // 2]


def headline(found: Mapping[str, Mapping[int, Capacity]], own: str, memory: Memory) -> str:
    tokens = typical(found[own])
    others = [
        f"{by_tokens[tokens].sequences:,} with {name}"
        for name, by_tokens in found.items()
        if name != own and tokens in by_tokens
    ]
    beside = f" ({', '.join(others)})" if others else ""
    rows = found[own][tokens].ridge_rows
    limit = "at no batch" if math.isinf(rows) else f"from {math.ceil(rows):,} rows on"
    return (
        f"{found[own][tokens].sequences:,} sequences of {tokens:,} tokens fit into {memory.gib:g} GiB beside the "
        f"weights{beside}; arithmetic would limit their steps {limit}"
    )


def _off_notes(found: Mapping[str, Mapping[int, Capacity]]) -> list[str]:
    off = [
        f"{name} at {tokens:,} tokens ({one.resident_by_stored:.2f}x)"
        for name, by_tokens in found.items()
        for tokens, one in by_tokens.items()
        if one.resident_by_stored is not None and abs(one.resident_by_stored - 1) > ALIKE_FRAC
    ]
    if not off:
        return [
            f"what was resident is within {ALIKE_FRAC:.0%} of what the stores say, wherever it was allocated"
        ]
    return [f"what was resident is not what the store says: {', '.join(off)}"]


def _table(found: Mapping[str, Mapping[int, Capacity]]) -> Rows:
    heading = [
        "kv",
        "tokens of each",
        "MiB of each",
        "predicted",
        "resident, MiB",
        "of, MiB",
        "fit",
        "arithmetic limits from",
    ]
    return [
        heading,
        *(
            [
                name,
                f"{tokens:,}",
                f"{one.row_bytes / MIB:.2f}",
                f"{one.predicted:,}",
                "-" if one.resident_bytes is None else f"{one.resident_bytes / MIB:,.1f}",
                f"{one.room_bytes / MIB:,.1f}",
                f"{one.sequences:,}",
                _rows(one.ridge_rows),
            ]
            for name, by_tokens in found.items()
            for tokens, one in by_tokens.items()
        ),
    ]


def _rows(number: float) -> str:
    return "never" if math.isinf(number) else f"{math.ceil(number):,} rows"


def _figures(
    title: str, found: Mapping[str, Mapping[int, Capacity]], lab: Lab, memory: Memory
) -> dict[str, Figure | None]:
    own = found[lab.arm.kv.name]
    measured = [
        Line(name, [(tokens, one.sequences) for tokens, one in by_tokens.items() if one.sequences])
        for name, by_tokens in found.items()
    ]
    shape = HFAdapter(lab.model).cache_shape(1, 1)
    theory = []
    for bits in (8.0 * shape.dtype.itemsize, 8.0, 4.0):
        token_bytes = kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, bits / 8)
        fitting = {
            tokens: batch_capacity(memory.total_bytes, memory.weights_bytes, token_bytes, tokens)
            for tokens in own
        }
        points = [(tokens, rows) for tokens, rows in fitting.items() if rows]
        theory.append(Line(FORMULA.format(bits), points, is_theory=True))
    ridge = [(tokens, one.ridge_rows) for tokens, one in own.items() if not math.isinf(one.ridge_rows)]
    theory.append(Line(f"rows from which arithmetic limits a step, {lab.arm.kv.name}", ridge, is_theory=True))
    panel = Panel([*measured, *theory], "tokens of each sequence", "sequences that fit")
    return {"batch_capacity.png": curves([panel], title)}
