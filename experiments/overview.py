"""Arms of a comparison as rows: speed, bytes and fidelity side by side, for many arms."""

from __future__ import annotations

from experiments import fidelity_report
from experiments.arm_fidelity import ArmFidelity
from experiments.comparison import ComparisonResult
from experiments.report import MISSING, Rows, ratio_text

HEADING = [
    "arm",
    "kernels",
    "TTFT ms",
    "TPOT ms",
    "decode [95 %]",
    "weights MiB",
    "read MiB",
    "bits/weight",
    "KV B/token",
    "KL to plain (floor)",
    "top token as plain's",
    "text against twin",
]


def rows(result: ComparisonResult) -> Rows:
    """One row per arm; the first row is the heading."""
    return [HEADING, *(_row(result, label) for label in result.comparison.points)]


def _row(result: ComparisonResult, label: str) -> list[str]:
    if label in result.measured.failures:
        return [label, "failed", *[MISSING] * (len(HEADING) - 2)]
    metrics, ratios = result.measured.metrics_of(label), result.speedups.get(label)
    return [
        label,
        ", ".join(result.comparison.points[label].kernels(result.comparison.arm(label))),
        f"{metrics['latency/ttft_ms.p50']:.0f}",
        f"{metrics['latency/tpot_ms.p50']:.1f}" if "latency/tpot_ms.p50" in metrics else MISSING,
        ratio_text(ratios.decode) if ratios else MISSING,
        f"{metrics['memory/weights_mib']:.0f}",
        f"{metrics['memory/weights_read_mib']:.0f}",
        f"{metrics['memory/bits_per_weight']:.2f}",
        f"{metrics['memory/kv_bytes_per_token']:,.0f}",
        *_fidelity(result.fidelities.get(label)),
        result.equivalence(label),
    ]


def _fidelity(fidelity: ArmFidelity | None) -> list[str]:
    figures = fidelity_report.headline(fidelity)
    return [MISSING, MISSING] if figures is None else list(figures)
