"""Weights x KV cache x decoding: speed, memory and fidelity of every combination in one table.

Speculation on a quantized target loses nothing against that target; what the target itself lost is the fidelity of its
weights and cache. So the table shows the two apart: fidelity against plain, and the text against the twin's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from experiments import overview
from experiments.comparison import prepare_comparison
from experiments.comparison_run import run_comparison
from experiments.studies.base import StudyOptions

BASELINE = ("plain", "dense", "baseline")
# Thirty-six arms: what would take longest and says least here is off unless it is asked for.
DEFAULTS = ("workload.limit=6", "workload.max_new_tokens=48", "measure.memory=false", "study=quant_grid")
VARIED = ("strategy", "weights", "kv", "decoding", "drafter", "verifier", "draft_length")


@dataclass
class QuantGridOptions(StudyOptions):
    """Names of weight formats, of KV stores, and of strategies whose decoding is taken."""

    weights: list[str] = field(default_factory=lambda: ["plain", "int8", "int4", "bnb_nf4"])
    kv: list[str] = field(default_factory=lambda: ["dense", "kv_int8", "kv_int4"])
    decodings: list[str] = field(default_factory=lambda: ["baseline", "prompt_lookup", "self_int4"])

    def __post_init__(self) -> None:
        for name in ("weights", "kv", "decodings"):
            if not getattr(self, name):
                raise ValueError(f"experiment.{name}=[]: expected at least one name")

    def prepare(self, overrides: Sequence[str]) -> Callable[[], bool]:
        started_s = time.perf_counter()
        for override in overrides:
            name = override.lstrip("+~").partition("=")[0]
            if name.partition(".")[0] in VARIED:
                raise ValueError(
                    f"{override}: the grid varies that itself; expected experiment.weights=[...], experiment.kv=[...] "
                    "or experiment.decodings=[...]"
                )
        candidates = [_arm(*combination) for combination in self._combinations() if combination != BASELINE]
        if not candidates:
            raise ValueError("experiment: the grid has the baseline only; expected something beside it")
        comparison = prepare_comparison(_arm(*BASELINE), candidates, [*DEFAULTS, *overrides])

        def run() -> bool:
            result = run_comparison(comparison, "quant_grid", started_s, overview.rows)
            return not result.measured.failures

        return run

    def _combinations(self) -> Iterator[tuple[str, str, str]]:
        return product(self.weights, self.kv, self.decodings)


def _arm(weights: str, kv: str, decoding: str) -> str:
    """As one writes it for `experiments.compare`; what is plain or dense is not said."""
    parts = [decoding, *([] if weights == "plain" else [f"weights={weights}"])]
    return " ".join([*parts, *([] if kv == "dense" else [f"kv={kv}"])])
