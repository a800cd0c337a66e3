"""The runs as a person sees them: the MLflow UI, drawn by a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_ui import ask, free_port, logged, server

from experiments import tracking

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
__all__ = ["logged"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path"),
]


def drawn(url: str, profile: Path) -> str:
    """The page's document after its scripts ran."""
    quiet = [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    ]
    headless = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    command = [str(CHROMIUM), *headless, *quiet, "--virtual-time-budget=20000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_run_and_its_metric_are_drawn(logged: tuple[tracking.Store, str], tmp_path: Path) -> None:
    store, run_id = logged
    experiment = tracking.experiment_id(store, "inference")
    port = free_port()
    with server(["-m", "mlflow", "ui", "--port", str(port), "--workers", "1"], store.root):
        ask(port, "/")  # waits until it listens
        runs = drawn(f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs", tmp_path / "a")
        assert "a point" in runs
        run = drawn(f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs/{run_id}", tmp_path / "b")
        assert "latency/ttft_ms.p50" in run
        assert "12.5" in run
