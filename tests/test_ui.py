"""The runs in a real MLflow server: plain `mlflow ui` in the root, and `python -m experiments.ui`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments import tracking, ui

CHECKOUT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[tracking.Store, str]:
    """A store with one run of the experiment `inference`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        store = tracking.open_store(tmp_path_factory.mktemp("root"))
        with tracking.run(store, "inference", "a point", {"kind": "point"}, {"model": {"bits": 4}}) as run:
            run.log_metrics({"latency/ttft_ms.p50": 12.5})
            run.log_text("headline", "report.md")
    return store, run.run_id


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], cwd: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server; afterwards it and everything it started is gone."""
    inherited = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**inherited, **tracking.MLFLOW_SETTINGS, "PYTHONPATH": str(CHECKOUT), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        stop_all(process)


def stop_all(process: subprocess.Popen[bytes]) -> None:
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        member.kill()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    """One answer of the server, waiting while it starts."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with opener.open(request, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def found_runs(port: int) -> list[dict[str, Any]]:
    experiments = json.loads(ask(port, "/api/2.0/mlflow/experiments/search", {"max_results": 100}))
    ids = {e["name"]: e["experiment_id"] for e in experiments["experiments"]}
    answer = json.loads(
        ask(port, "/api/2.0/mlflow/runs/search", {"experiment_ids": [ids["inference"]], "max_results": 10})
    )
    return list(answer["runs"])


@pytest.mark.timeout(120)
def test_plain_mlflow_ui_in_the_root_shows_the_run(logged: tuple[tracking.Store, str]) -> None:
    store, run_id = logged
    port = free_port()
    with server(["-m", "mlflow", "ui", "--port", str(port), "--workers", "1"], store.root):
        (run,) = found_runs(port)
        assert run["info"]["run_id"] == run_id
        assert run["info"]["run_name"] == "a point"
        assert run["info"]["status"] == "FINISHED"
        assert [(m["key"], m["value"]) for m in run["data"]["metrics"]] == [("latency/ttft_ms.p50", 12.5)]
        assert {"key": "model.bits", "value": "4"} in run["data"]["params"]
        assert {"key": "kind", "value": "point"} in run["data"]["tags"]
        assert ask(port, f"/get-artifact?run_id={run_id}&path=report.md") == b"headline"
        assert b"<html" in ask(port, "/").lower()


@pytest.mark.timeout(120)
def test_our_ui_serves_the_same_store_from_another_folder(
    logged: tuple[tracking.Store, str], tmp_path: Path
) -> None:
    store, run_id = logged
    port = free_port()
    command = ["-m", "experiments.ui", "--port", str(port)]
    with server(command, tmp_path, MLFLOW_TRACKING_URI=store.uri) as process:
        (run,) = found_runs(port)
        assert run["info"]["run_id"] == run_id
        assert ask(port, f"/get-artifact?run_id={run_id}&path=report.md") == b"headline"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ui.main(["--port", str(port)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert f"port {port}: Address already in use" in output.err


def test_an_unknown_host_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main(["--host", "256.1.1.1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("port", ["0", "70000", "x"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ui.main(["--port", port])
    assert caught.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_a_team_server_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example:8443")
    assert ui.main([]) == 0
    output = capsys.readouterr().out
    assert "https://mlflow.example:8443" in output
    assert "secret" not in output
