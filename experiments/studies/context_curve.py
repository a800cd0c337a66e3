"""A decode step behind longer and longer texts, the cache it reads, and where that cache outgrows the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.cache_growth import CacheGrowth, cache_growth
from experiments.articles.findings import Findings, Rows
from experiments.articles.fits import line_through
from experiments.articles.floor_lines import (
    FLOOR_HEADING,
    agreement,
    floor_cells,
    floor_lines,
    measured_line,
)
from experiments.articles.lab import Floors, Lab, along
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.bench import MIB
from experiments.known_models import KNOWN_MODELS
from experiments.plots.curves import Line, Panel, curves
from experiments.roofline import GIGA
from experiments.theory import equal_cache_tokens, kv_bytes_per_token
from quant.footprint import stored_bytes
from specdec.hf_adapter import HFAdapter

# What the articles say of an 8B model: bytes of a token, and the tokens whose cache equals the weights.
ARTICLES_EQUAL = ["articles: 8B model, 16 bits", "131,072", "131,072 (128k)"]
GROWTH_BUDGET_S = 0.3


@dataclass
class ContextCurveOptions(ArticleOptions):
    """`contexts`: tokens in the cache when the step begins. `kv`: stores that are measured beside the run's own."""

    title: ClassVar[str] = "One decode step behind longer and longer texts"
    stores: ClassVar[str] = "kv"

    contexts: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024, 2048, 4096])
    kv: list[str] = field(default_factory=lambda: ["dense", "kv_int8", "kv_int4"])

    def __post_init__(self) -> None:
        self.check_at_least(contexts=1)

    def measure(self, lab: Lab) -> Findings:
        own = lab.arm.kv.name
        found: dict[str, dict[int, ContextStep]] = {}
        limits: dict[str, str] = {}
        for name, store in lab.stores(self.kv).items():
            found[name], missing = steps_along(store, self.contexts)
            limits |= {where if name == own else f"{name} {where}": why for where, why in missing.items()}
        steps = found[own]
        timings = {context: step.timing for context, step in steps.items()}
        floors, _ = along(list(steps), "context", lambda context: lab.floors(1, 1, context, kernels=True))
        growths, missing = along(
            list(steps), "growing to", lambda context: cache_growth(lab, context, budget_s=GROWTH_BUDGET_S)
        )
        weights_bytes, token_bytes = stored_bytes(lab.model), lab.cost.kv_bytes_per_token
        equal = equal_cache_tokens(weights_bytes, token_bytes)
        title = headline(steps, equal)
        return Findings(
            title,
            curves={name: points for store in found for name, points in _curves(found[store], store, own)},
            metrics={"curve_context/equal_tokens": equal, "memory/weights_mib": weights_bytes / MIB},
            tables={
                f"One step of one row, kv={own}": _table(steps, floors),
                "The same by how keys and values are stored": _store_table(found),
                "Room for one more token: memory that grows, and memory that was there": _growth_table(
                    growths, max(steps)
                ),
                "Tokens whose keys and values are as large as the weights": _equal_table(
                    found, weights_bytes
                ),
            },
            figures=_figures(title, found, lab, floors, weights_bytes),
            notes=[
                *_slope_notes(timings, token_bytes / (GIGA * lab.ceilings.read_gb_s)),
                _growth_note(timings, growths),
                agreement(timings, floors),
                *_range_notes(self.contexts, lab.context),
            ],
            limits=limits | missing,
        )


@dataclass(frozen=True)
class ContextStep:
    """A step behind a text, and the bytes that its keys and values take; `token_bytes` of one more token."""

    timing: Timing
    kv_bytes: int
    token_bytes: float


def steps_along(lab: Lab, contexts: list[int]) -> tuple[dict[int, ContextStep], dict[str, str]]:
    """One text that grows from context to context: what was read once is not read again."""
    fitting, missing = along(contexts, "context", lambda context: lab.check_fits(1, context + 1))
    runner = lab.runner(1, max(fitting) + 1)

    def step(context: int) -> ContextStep:
        lab.read_on(runner, context)
        store = runner.cache.store
        return ContextStep(lab.pass_on(runner, 1), store.live_bytes(runner.lengths), store.bytes_per_token)

    found, more = along(list(fitting), "context", step)
    return found, missing | more


def headline(steps: Mapping[int, ContextStep], equal: float) -> str:
    short, long = min(steps), max(steps)
    ratio = steps[long].timing.median_ms / steps[short].timing.median_ms
    return (
        f"A step behind {long:,} tokens takes {ratio:.2f} times as long as behind {short:,}; its cache holds "
        f"{steps[long].kv_bytes / MIB:,.0f} MiB, and would be as large as the weights at {equal:,.0f} tokens"
    )


def _slope_notes(timings: Mapping[int, Timing], token_s: float) -> list[str]:
    if len(timings) < 2:
        return []
    _, slope_ms = line_through({context: timing.median_ms for context, timing in timings.items()})
    return [
        f"fitted, 1,000 more tokens of context add {1e3 * slope_ms:.2f} ms to a step (least squares of relative "
        f"errors); reading their keys and values at this machine's bandwidth takes {1e6 * token_s:.2f} ms"
    ]


def _growth_note(timings: Mapping[int, Timing], growths: Mapping[int, CacheGrowth]) -> str:
    longest = max(growths)
    growth, step_ms = growths[longest], timings[longest].median_ms
    return (
        f"at {longest:,} tokens a cache that grows by concatenation would take {growth.growing.median_ms:.2f} ms for "
        f"one more token, {growth.growing.median_ms / step_ms:.1%} of a step; one that was preallocated takes "
        f"{growth.writing.median_ms:.2f} ms"
    )


def _range_notes(contexts: list[int], most: int) -> list[str]:
    if 2 * max(contexts) >= most:
        return []
    return [
        f"the model holds {most:,} tokens; this stops at {max(contexts):,}: experiment.contexts=[...,{most - 1}]"
    ]


def _curves(
    steps: Mapping[int, ContextStep], store: str, own: str
) -> list[tuple[str, list[tuple[int, float]]]]:
    """The run's own store under the names that all runs share, the others with theirs added."""
    end = "" if store == own else f".{store}"
    return [
        (
            f"curve_context/step_ms{end}",
            [(context, step.timing.median_ms) for context, step in steps.items()],
        ),
        (f"curve_context/kv_mib{end}", [(context, step.kv_bytes / MIB) for context, step in steps.items()]),
    ]


def _table(steps: Mapping[int, ContextStep], floors: Mapping[int, Floors]) -> Rows:
    return [
        ["context", "step, ms [quartiles]", "first, ms", "KV, MiB", *FLOOR_HEADING],
        *(
            [
                f"{context:,}",
                str(step.timing),
                f"{step.timing.first_ms:.1f}",
                f"{step.kv_bytes / MIB:.1f}",
                *floor_cells(floors.get(context)),
            ]
            for context, step in steps.items()
        ),
    ]


def _store_table(found: Mapping[str, Mapping[int, ContextStep]]) -> Rows:
    contexts = sorted({context for steps in found.values() for context in steps})

    def cells(context: int) -> list[str]:
        steps = [by_context.get(context) for by_context in found.values()]
        times = ["-" if step is None else f"{step.timing.median_ms:.1f}" for step in steps]
        return times + ["-" if step is None else f"{step.kv_bytes / MIB:.1f}" for step in steps]

    heading = [f"{store}, ms" for store in found] + [f"{store}, MiB" for store in found]
    return [["context", *heading], *([f"{context:,}", *cells(context)] for context in contexts)]


def _growth_table(growths: Mapping[int, CacheGrowth], longest: int) -> Rows:
    per_token = growths[min(growths)].live_bytes / min(growths)
    return [
        [
            "context",
            "live, MiB",
            "growing holds, MiB",
            f"preallocated for {longest:,}, MiB",
            "growing, ms",
            "writing, ms",
        ],
        *(
            [
                f"{context:,}",
                f"{growth.live_bytes / MIB:.1f}",
                f"{growth.most_bytes / MIB:.1f}",
                f"{per_token * (longest + 1) / MIB:.1f}",
                str(growth.growing),
                str(growth.writing),
            ]
            for context, growth in growths.items()
        ),
    ]


def _equal_table(found: Mapping[str, Mapping[int, ContextStep]], weights_bytes: int) -> Rows:
    own = []
    for store, steps in found.items():
        token_bytes = next(iter(steps.values())).token_bytes
        tokens = equal_cache_tokens(weights_bytes, token_bytes)
        own.append([f"this model, kv={store}", f"{token_bytes:,.0f}", f"{tokens:,.0f}"])
    known = [
        [
            f"{model.name}, 16 bits",
            f"{model.kv_bytes_per_token():,.0f}",
            f"{equal_cache_tokens(model.weights_bytes(), model.kv_bytes_per_token()):,.0f}",
        ]
        for model in KNOWN_MODELS.values()
    ]
    return [["model", "KV bytes of a token", "cache equals weights at, tokens"], *own, *known, ARTICLES_EQUAL]


def _figures(
    title: str,
    found: Mapping[str, Mapping[int, ContextStep]],
    lab: Lab,
    floors: Mapping[int, Floors],
    weights_bytes: int,
) -> dict[str, Figure | None]:
    times = [
        measured_line({context: step.timing for context, step in steps.items()}, store)
        for store, steps in found.items()
    ]
    sizes = [
        Line(store, [(context, step.kv_bytes / MIB) for context, step in steps.items()])
        for store, steps in found.items()
    ]
    contexts = list(found[lab.arm.kv.name])
    shape = HFAdapter(lab.model).cache_shape(1, 1)
    by_formula = kv_bytes_per_token(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize
    )
    theory = [
        Line(
            "2 x layers x heads x head size x bytes of a value",
            [(context, context * by_formula / MIB) for context in contexts],
            is_theory=True,
        ),
        Line("the weights", [(context, weights_bytes / MIB) for context in contexts], is_theory=True),
    ]
    context = "tokens in the cache"
    step = Panel([*times, *floor_lines(floors)], context, "time of a step, ms")
    size = Panel([*sizes, *theory], context, "keys and values, MiB")
    return {"context_curve.png": curves([step, size], title)}
