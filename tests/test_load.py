"""Processor time of others, with a real busy process."""

from __future__ import annotations

import subprocess
import sys
import time

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
    monkeypatch.setattr(load, "_counters", lambda: next(readings))
    found = LoadMeter().read()
    assert found == ForeignLoad((20.5 - 19.5) / 10)
    assert not found.is_noisy


def test_counters_that_disagree_are_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 100.0, 5.0), (20.0, 119.0, 24.5)])
    monkeypatch.setattr(load, "_counters", lambda: next(readings))
    assert LoadMeter().read() == ForeignLoad(0.0)
