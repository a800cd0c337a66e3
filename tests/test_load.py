"""Processor time of others, with a real busy process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from experiments import load
from experiments.load import ForeignLoad, LoadMeter

BUSY = "while True: pass"


def test_a_busy_neighbour_is_seen() -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.3)  # its start-up
        meter = LoadMeter()
        time.sleep(1.0)
        assert meter.read().is_noisy
    finally:
        neighbour.kill()
        neighbour.wait()


def test_own_work_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 100.0, 5.0), (20.0, 120.5, 24.5)])
    averages = iter([0.5, 1.75])
    monkeypatch.setattr(load, "_counters", lambda: next(readings))
    monkeypatch.setattr(load, "_load_average", lambda: next(averages))
    found = LoadMeter().read()
    assert found == ForeignLoad((20.5 - 19.5) / 10, 19.5 / 10, 0.5, 1.75)
    assert not found.is_noisy


def test_counters_that_disagree_are_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 100.0, 5.0), (20.0, 119.0, 24.5)])
    monkeypatch.setattr(load, "_counters", lambda: next(readings))
    assert LoadMeter().read().cores == 0.0


def test_no_time_passed_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_counters", lambda: (10.0, 100.0, 5.0))
    found = LoadMeter().read()
    assert (found.cores, found.own_cores) == (0.0, 0.0)


def test_own_cores_are_what_we_computed() -> None:
    meter, started_s, began_s = LoadMeter(), time.monotonic(), time.process_time()
    while time.process_time() - began_s < 0.3:
        pass
    found = meter.read()
    assert found.own_cores is not None
    # The meter's stretch is the wider one on both clocks, by far less than a tenth.
    assert found.own_cores > 0.9 * 0.3 / (time.monotonic() - started_s)


def test_the_threshold_is_absolute() -> None:
    assert not ForeignLoad(load.MOST_FOREIGN_CORES).is_noisy
    assert ForeignLoad(load.MOST_FOREIGN_CORES + 0.01, own_cores=1.0).is_noisy  # a core was left idle


def test_niced_and_stolen_time_is_busy_time() -> None:
    times = SimpleNamespace(user=1.0, nice=2.0, system=4.0, irq=8.0, softirq=16.0, steal=32.0, idle=64.0)
    assert load._busy_s(times) == 63.0
    assert load._busy_s(SimpleNamespace(user=1.0, system=4.0)) == 5.0  # some systems have no more


def test_load_as_json() -> None:
    assert json.loads(json.dumps(ForeignLoad(0.25, 1.5, 2.0, 3.0).as_dict())) == {
        "foreign_cores": 0.25,
        "own_cores": 1.5,
        "load_average_before": 2.0,
        "load_average_after": 3.0,
        "most_foreign_cores": 0.15,
        "is_noisy": True,
    }
    assert ForeignLoad(0.0).as_dict()["load_average_before"] is None
    json.dumps(LoadMeter().read().as_dict(), allow_nan=False)


def test_no_load_average_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unobtainable() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(load.psutil, "getloadavg", unobtainable)
    assert LoadMeter().read().load_average_after is None
