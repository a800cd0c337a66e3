"""Ceilings kept in the experiment store: measured once per machine and setting, one run of `kind=ceilings` each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from experiments import tracking
from experiments._processes import host_id
from experiments.hardware import READ_GB_S, Values
from experiments.load import LoadMeter
from experiments.metrics import METRICS_VERSION
from experiments.tracking import Store

SECTION = "ceilings/"


class StoredCeilings:
    """A `Remember` for `Hardware`. What was measured beside a busy process is used, but not used again.

    Args:
        study: the MLflow experiment that new measurements are logged under; old ones are found in all.
        refresh: measure again whatever is known.
    """

    def __init__(self, store: Store, study: str, refresh: bool = False) -> None:
        self._store = store
        self._study = study
        self._refresh = refresh
        self.run_id: str | None = None  # of the bandwidth and arithmetic, once they were asked for
        self.is_noisy = False  # was anything that is in use measured beside a busy process?

    def __call__(self, key: Mapping[str, str], measure: Callable[[], Values]) -> Values:
        key = {**key, "host": host_id()}
        key_hash = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        values, run_id = self._known(key_hash) or self._measured(key, key_hash, measure)
        if READ_GB_S in values:
            self.run_id = run_id
        return values

    def _known(self, key_hash: str) -> tuple[Values, str] | None:
        if self._refresh:
            return None
        wanted = (
            f"tags.ceilings_key = '{key_hash}' and tags.validity = 'ok' and attributes.status = 'FINISHED'"
        )
        for run in tracking.find_runs(self._store, None, wanted):
            found = {name.removeprefix(SECTION): value for name, value in run.metrics.items()}
            return found, run.run_id
        return None

    def _measured(
        self, key: Mapping[str, str], key_hash: str, measure: Callable[[], Values]
    ) -> tuple[Values, str]:
        tags = {"kind": "ceilings", "ceilings_key": key_hash, "metrics_version": METRICS_VERSION, **key}
        with tracking.run(self._store, self._study, f"ceilings {key_hash[:6]}", tags, key) as logged:
            load = LoadMeter()
            values = measure()
            noisy = load.read().is_noisy
            logged.log_metrics({SECTION + name: value for name, value in values.items()})
            logged.set_tags({"validity": "noisy" if noisy else "ok"})
            self.is_noisy = self.is_noisy or noisy
        return values, logged.run_id
