"""A decode step by the bytes of a weight: on a line through the origin if reading weights were all it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments import plugins
from experiments.articles.findings import Findings, Rows
from experiments.articles.fits import line_through
from experiments.articles.floor_lines import AGREES_FRAC, FLOOR_HEADING, NO_OVERHEAD, floor_cells
from experiments.articles.lab import OUT_OF_MEMORY, Floors, Lab, LimitError
from experiments.articles.study import ArticleOptions
from experiments.articles.timing import Timing
from experiments.bench import MIB
from experiments.config import DTYPES, check
from experiments.models import LoadedModels, torch_dtype
from experiments.plots.curves import Line, Mark, Panel, curves
from experiments.point import PreparedPoint
from quant.footprint import num_parameters

WEIGHT_DTYPES = [name for name in DTYPES if name != "auto"]


@dataclass
class QuantizedDecodeOptions(ArticleOptions):
    """`formats`: dtypes of plain weights, or weight formats in the run's dtype. `context_tokens`: cached before."""

    title: ClassVar[str] = "One decode step by the bytes of a weight"

    formats: list[str] = field(default_factory=lambda: ["fp32", "bf16", "int8", "int4"])
    context_tokens: int = 64

    def __post_init__(self) -> None:
        known = [*WEIGHT_DTYPES, *plugins.known("weights")]
        is_right = bool(self.formats) and set(self.formats) <= set(known)
        check(is_right, "experiment.formats", self.formats, f"at least one of {', '.join(known)}")
        self.check_at_least(context_tokens=1)

    def point(self, overrides: Sequence[str], loaded: LoadedModels | None = None) -> PreparedPoint:
        point = super().point(overrides, loaded)
        name = point.config.weights.name
        check(
            name == "plain", "weights", name, "plain: this experiment varies them by experiment.formats=[...]"
        )
        return point

    def measure(self, lab: Lab) -> Findings:
        found: dict[str, FormatStep] = {}
        limits: dict[str, str] = {}
        for name in dict.fromkeys(self.formats):
            try:
                found[name] = format_step(lab, name, self.context_tokens)
            except (LimitError, ValueError) as error:  # no memory, or a format that can't hold this model
                limits[name] = str(error)
        if not found:
            raise LimitError("; ".join(f"{name}: {why}" for name, why in limits.items()))
        line = OriginLine.through({step.bytes_per_weight: step.timing.median_ms for step in found.values()})
        title = headline(found, line)
        return Findings(
            title,
            metrics={
                **{f"quantized_decode/step_ms.{name}": step.timing.median_ms for name, step in found.items()},
                **{
                    f"quantized_decode/read_mib.{name}": step.read_bytes / MIB for name, step in found.items()
                },
                "quantized_decode/off_line_frac": line.off_frac,
                "quantized_decode/fit_offset_ms": line.offset_ms,
            },
            tables={"One step of one row": _table(found, line)},
            figures=_figures(title, found, line),
            notes=[*_line_notes(line), *_floor_notes(found)],
            limits=limits,
        )


@dataclass(frozen=True)
class FormatStep:
    """A step with weights in one format: `bytes_per_weight` that it reads, scales included, by what multiplies."""

    timing: Timing
    floors: Floors
    read_bytes: int
    bytes_per_weight: float
    kernels: str


def format_step(lab: Lab, name: str, context: int) -> FormatStep:
    """Raises LimitError without memory for the weights, ValueError for a format that can't hold the model."""
    own = lab.varied(weights="plain" if name in WEIGHT_DTYPES else name)
    if name in WEIGHT_DTYPES and name != lab.point.config.dtype:
        if num_parameters(lab.model) * torch_dtype(name).itemsize > lab.free_bytes:
            raise LimitError(OUT_OF_MEMORY)
        own = own.in_dtype(name)
    cost = own.cost
    return FormatStep(
        own.one_pass(1, 1, context),
        own.floors(1, 1, context, kernels=True),
        cost.weights_read_bytes,
        cost.weights_read_bytes / (cost.body_parameters + cost.head_parameters),
        ", ".join(own.point.kernels(own.arm)),
    )


@dataclass(frozen=True)
class OriginLine:
    """Time = `slope_ms` x bytes of a weight, and how far the points are from it; beside it a line with an offset.

    Both have the least relative errors. `offset_ms` is None for points at fewer than two places.
    """

    slope_ms: float
    off_frac: float
    offset_ms: float | None
    offset_slope_ms: float

    @staticmethod
    def through(points: Mapping[float, float]) -> OriginLine:
        """Milliseconds by bytes of a weight."""
        sizes, ms = np.array(list(points)), np.array(list(points.values()))
        shares = sizes / ms
        slope = float(shares.sum() / (shares**2).sum())
        off = float(np.abs(slope * shares - 1).max())
        if len(points) < 2:
            return OriginLine(slope, off, None, slope)
        return OriginLine(slope, off, *line_through(points))


def headline(found: Mapping[str, FormatStep], line: OriginLine) -> str:
    heavy = max(found, key=lambda name: found[name].read_bytes)
    light = min(found, key=lambda name: found[name].read_bytes)
    bytes_frac = found[light].read_bytes / found[heavy].read_bytes
    ms_frac = found[light].timing.median_ms / found[heavy].timing.median_ms
    if light == heavy:
        return f"With {light} weights a step takes {found[light].timing.median_ms:.1f} ms"
    return (
        f"With {light} weights a step reads {bytes_frac:.0%} of what it reads with {heavy}, and takes {ms_frac:.0%} of "
        f"the time; a line through the origin is off by up to {line.off_frac:.0%}"
    )


def _line_notes(line: OriginLine) -> list[str]:
    text = f"fitted, a step is {line.slope_ms:.1f} ms for each byte of a weight if the line goes through the origin"
    if line.offset_ms is None:
        return [text]
    text += (
        f"; {line.offset_ms:.1f} ms + {line.offset_slope_ms:.1f} ms for each byte if it need not (least squares of "
        "relative errors)"
    )
    if line.offset_ms > 0:
        text += "; the offset is what a step takes whatever its weights are, if all kernels read them as fast"
    return [text]


def _floor_notes(found: Mapping[str, FormatStep]) -> list[str]:
    shares = {
        name: step.floors.with_overhead_ms / step.timing.median_ms
        for name, step in found.items()
        if step.floors.with_overhead_ms is not None
    }
    if not shares:
        return [NO_OVERHEAD]
    off = [f"{name} ({share:.2f})" for name, share in shares.items() if abs(share - 1) > AGREES_FRAC]
    where = f"off by more than {AGREES_FRAC:.0%}: {', '.join(off)}" if off else f"within {AGREES_FRAC:.0%}"
    return [f"the hardware floor and the overhead of a pass, as shares of what was measured, are {where}"]


def _table(found: Mapping[str, FormatStep], line: OriginLine) -> Rows:
    return [
        [
            "weights",
            "bytes each",
            "read, MiB",
            "step, ms [quartiles]",
            "first, ms",
            "on the line, ms",
            *FLOOR_HEADING,
            "kernels",
        ],
        *(
            [
                name,
                f"{step.bytes_per_weight:.2f}",
                f"{step.read_bytes / MIB:,.0f}",
                str(step.timing),
                f"{step.timing.first_ms:.1f}",
                f"{line.slope_ms * step.bytes_per_weight:.1f}",
                *floor_cells(step.floors),
                step.kernels,
            ]
            for name, step in found.items()
        ),
    ]


def _figures(title: str, found: Mapping[str, FormatStep], line: OriginLine) -> dict[str, Figure | None]:
    steps = dict(sorted(found.items(), key=lambda item: item[1].bytes_per_weight))
    sizes = [0.0, *(step.bytes_per_weight for step in steps.values())]
    lines = [
        Line(
            "measured",
            [(step.bytes_per_weight, step.timing.median_ms) for step in steps.values()],
            spread=[(step.timing.low_ms, step.timing.high_ms) for step in steps.values()],
        ),
        Line(
            "a line through the origin, fitted",
            [(size, line.slope_ms * size) for size in sizes],
            is_theory=True,
        ),
        Line(
            "hardware floor (measured ceilings)",
            [(step.bytes_per_weight, step.floors.hardware_ms) for step in steps.values()],
            is_theory=True,
        ),
    ]
    marks = [Mark(name, (step.bytes_per_weight, step.timing.median_ms)) for name, step in steps.items()]
    panel = Panel(
        lines,
        "bytes that a step reads for each weight",
        "time of a step, ms",
        log_x=False,
        log_y=False,
        marks=marks,
    )
    return {"quantized_decode.png": curves([panel], title)}
