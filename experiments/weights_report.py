"""What a plan of weights says, as rows of a table: before the run, and in its artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from experiments.load import ForeignLoad
from quant.kernels.choice import seconds_spent
from quant.plan import PlanRow, WeightsPlan

HEADING = ["linear layers", "number", "outputs x inputs", "kernel", "bits a weight", "remark"]
KEPT = "plain"


def rows(plan: WeightsPlan) -> list[list[str]]:
    """Layers of one kind on one line; the first row is the heading."""
    groups: dict[tuple[str, ...], list[PlanRow]] = {}
    for row in plan.rows:
        kernel = KEPT if row.storage is None else row.storage.kernel
        shape = f"{row.site.outputs} x {row.site.inputs}"
        groups.setdefault((row.site.pattern, shape, kernel, _remark(row)), []).append(row)
    lines = [
        [pattern, str(len(found)), shape, kernel, f"{found[0].bits_per_weight:.2f}", remark]
        for (pattern, shape, kernel, remark), found in groups.items()
    ]
    return [HEADING, *lines]


def totals(plan: WeightsPlan) -> str:
    """The whole model in a line, and what kernels were chosen by."""
    chosen = f"; kernels by their cost in microseconds, {plan.choice}" if plan.choice else ""
    return (
        f"{100 * plan.quantized_share:.1f} % of {plan.num_parameters:,} parameters quantized, "
        f"{plan.bits_per_weight:.2f} bits a weight with scales; {INVARIANCE[plan.row_invariant]}{chosen}"
    )


INVARIANCE: Mapping[bool | None, str] = {
    True: "a token's product doesn't depend on what else is in its pass",
    False: "a token's product depends on what else is in its pass",
    None: "whether a token's product depends on what else is in its pass is not known",
}


def doubt_line(load: ForeignLoad, plans: Iterable[WeightsPlan | None]) -> str:
    """Of kernels that were timed while something else kept the machine busy; empty where nothing is in doubt."""
    if not load.is_noisy or not any(plan is not None and plan.choice for plan in plans):
        return ""
    return (
        f"other processes kept {load.cores:.1f} cores busy while kernels were timed: a quiet machine may choose "
        "others, which round otherwise (weights.kernel=... names one)"
    )


def exactness_line(plans: Mapping[str, WeightsPlan | None]) -> str:
    """What the target's kernels take from a comparison of texts; empty where they take nothing."""
    plan = plans.get("target")
    if plan is None or plan.row_invariant:
        return ""
    return (
        f"weights: {INVARIANCE[plan.row_invariant]} ({', '.join(plan.kernels)}), so speculation's text need not be its "
        "twin's, and no exactness is claimed of it"
    )


def first_use_line(conversion_s: float) -> str:
    """What came before anything was timed; empty where nothing did."""
    parts = {"choosing kernels": seconds_spent(), "converting and packing weights": conversion_s}
    said = [f"{what} {seconds:.2f} s" for what, seconds in parts.items() if seconds >= 0.005]
    return f"first use, not in any timing: {', '.join(said)}" if said else ""


def _remark(row: PlanRow) -> str:
    shared = f"with {row.site.embedding}" if row.site.embedding and row.storage is not None else ""
    return "; ".join(part for part in (shared, row.reason) if part)
