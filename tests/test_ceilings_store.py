"""Ceilings in the store: measured once per machine and setting, what was noisy or failed measured again."""

from __future__ import annotations

import pytest

from experiments import ceilings_store, tracking
from experiments.ceilings_store import StoredCeilings
from experiments.hardware import GEMM_GFLOP_S, OVERHEAD_MS, READ_GB_S, Values
from experiments.load import ForeignLoad
from experiments.tracking import StoredRun

KEY = {"device": "cpu", "dtype": "bfloat16", "threads": "2"}


class Meter:
    """A LoadMeter that reads what it is told."""

    cores = 0.0

    def read(self) -> ForeignLoad:
        return ForeignLoad(self.cores)


class Measurement:
    """Rates that rise with each call, so that an old value is told from a new one."""

    def __init__(self, *names: str) -> None:
        self.names = names or (READ_GB_S, GEMM_GFLOP_S)
        self.calls = 0

    def __call__(self) -> Values:
        self.calls += 1
        return dict.fromkeys(self.names, 10.0 * self.calls)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tracking.Store:
    root = tmp_path_factory.mktemp("ceilings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        return tracking.open_store(root)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> dict[str, str]:
    """One that no other test has measured."""
    return {**KEY, "device_name": request.node.name}


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> type[Meter]:
    monkeypatch.setattr(ceilings_store, "LoadMeter", Meter)
    monkeypatch.setattr(Meter, "cores", 0.0)
    return Meter


def run_of(store: tracking.Store, remember: StoredCeilings, study: str | None = None) -> StoredRun:
    (found,) = (run for run in tracking.find_runs(store, study) if run.run_id == remember.run_id)
    return found


def test_a_measurement_is_a_run_of_its_own(store: tracking.Store, key: dict[str, str]) -> None:
    remember = StoredCeilings(store, "alone")
    assert remember(key, Measurement()) == {READ_GB_S: 10.0, GEMM_GFLOP_S: 10.0}
    found = run_of(store, remember, "alone")
    assert found.status == "FINISHED"
    assert found.metrics == {"ceilings/read_gb_s": 10.0, "ceilings/gemm_gflop_s": 10.0}
    assert {name: found.tags[name] for name in ("kind", "validity", *key)} == {
        "kind": "ceilings",
        "validity": "ok",
        **key,
    }
    assert found.tags["host"]
    assert found.params["dtype"] == "bfloat16"


def test_what_is_known_is_not_measured_again(store: tracking.Store, key: dict[str, str]) -> None:
    measurement = Measurement()
    first, second = StoredCeilings(store, "one study"), StoredCeilings(store, "another study")
    values = first(key, measurement)
    assert second(dict(reversed(key.items())), measurement) == values
    assert (measurement.calls, second.run_id) == (1, first.run_id)
    assert tracking.find_runs(store, "another study") == []


@pytest.mark.parametrize("changed", ["device", "dtype", "threads"])
def test_another_setting_is_measured(store: tracking.Store, key: dict[str, str], changed: str) -> None:
    measurement, remember = Measurement(), StoredCeilings(store, "settings")
    remember(key, measurement)
    remember({**key, changed: "other"}, measurement)
    assert measurement.calls == 2


def test_another_machine_is_measured(
    store: tracking.Store, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement, remember = Measurement(), StoredCeilings(store, "machines")
    remember(key, measurement)
    monkeypatch.setattr(ceilings_store, "host_id", lambda: "another")
    remember(key, measurement)
    assert measurement.calls == 2
    assert run_of(store, remember).tags["host"] == "another"


def test_a_noisy_measurement_is_used_but_not_again(
    store: tracking.Store, key: dict[str, str], load: type[Meter]
) -> None:
    measurement, remember = Measurement(), StoredCeilings(store, "noisy")
    load.cores = 1.0
    assert remember(key, measurement)[READ_GB_S] == 10.0
    assert run_of(store, remember).tags["validity"] == "noisy"
    load.cores = 0.0
    assert remember(key, measurement)[READ_GB_S] == 20.0
    assert remember(key, measurement)[READ_GB_S] == 20.0


def test_refresh_measures_what_is_known_and_is_remembered(store: tracking.Store, key: dict[str, str]) -> None:
    measurement, refresh = Measurement(), StoredCeilings(store, "refresh", refresh=True)
    first = StoredCeilings(store, "refresh")
    first(key, measurement)
    assert refresh(key, measurement)[READ_GB_S] == 20.0
    assert refresh.run_id != first.run_id
    assert StoredCeilings(store, "refresh")(key, measurement)[READ_GB_S] == 20.0


def test_a_failed_measurement_is_raised_and_not_remembered(
    store: tracking.Store, key: dict[str, str]
) -> None:
    def fail() -> Values:
        raise RuntimeError("injected")

    remember = StoredCeilings(store, "failed")
    with pytest.raises(RuntimeError, match="injected"):
        remember(key, fail)
    assert remember.run_id is None
    (found,) = tracking.find_runs(store, "failed")
    assert (found.status, found.metrics) == ("FAILED", {})
    assert remember(key, Measurement())[READ_GB_S] == 10.0


def test_the_run_that_is_referred_to_holds_the_rates(store: tracking.Store, key: dict[str, str]) -> None:
    remember = StoredCeilings(store, "rates")
    remember(key, Measurement())
    rates = remember.run_id
    assert remember({**key, "weights": "plain"}, Measurement(OVERHEAD_MS)) == {OVERHEAD_MS: 10.0}
    assert remember.run_id == rates


def test_that_nothing_can_be_measured_is_remembered(store: tracking.Store, key: dict[str, str]) -> None:
    """A weight format that holds none of the tiny models has no overhead."""
    remember = StoredCeilings(store, "nothing")
    calls: list[str] = []

    def measure() -> Values:
        calls.append("called")
        return {}

    assert remember(key, measure) == remember(key, measure) == {}
    assert calls == ["called"]
