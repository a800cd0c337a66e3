"""The report run of a sweep: its points side by side. Speed-ups are each point's own, against its own references."""

from __future__ import annotations

from experiments import tracking
from experiments.command_line import Sweep
from experiments.metrics import METRICS_VERSION
from experiments.tracking import StoredRun

COLUMNS = (
    ("TTFT ms", "latency/ttft_ms.p50"),
    ("TPOT ms", "latency/tpot_ms.p50"),
    ("speed-up", "speedup/decode_vs_plain"),
    ("accepted", "spec/acceptance_rate"),
)


def write(sweep: Sweep) -> None:
    """Log one run of `kind=report` that lists the sweep's points, failed ones included."""
    store = tracking.open_store()
    validity = "failed" if sweep.failures else "ok"
    tags = {
        "kind": "report",
        "sweep_id": str(sweep.sweep_id),
        "validity": validity,
        "metrics_version": METRICS_VERSION,
    }
    for study in sorted(sweep.studies):
        runs = tracking.find_runs(store, study, f"tags.sweep_id = '{sweep.sweep_id}'")
        text = report(runs, sweep.failures)
        with tracking.run(store, study, f"sweep {sweep.sweep_id}", tags, {}) as logged:
            logged.set_description(text)
            logged.log_text(text, "report.md")
        print(text)


def report(runs: list[StoredRun], failures: list[str]) -> str:
    """A Markdown table, oldest point first, and a line for each failure."""
    lines = ["| variant | " + " | ".join(heading for heading, _ in COLUMNS) + " | verdict | equivalence |"]
    lines.append("| --- " * (len(COLUMNS) + 3) + "|")
    for run in reversed(runs):
        cells = [f"{run.metrics[name]:.2f}" if name in run.metrics else "-" for _, name in COLUMNS]
        variant, equivalence = run.tags.get("variant", run.name), run.tags.get("equivalence", "-")
        verdict = run.tags.get("verdict", "-")
        lines.append(f"| {variant} | {' | '.join(cells)} | {verdict} | {equivalence} |")
    return "\n".join([*lines, "", *(f"* failed: {line}" for line in failures)])
