"""The store on real SQLite files: statuses, repair, first use together, whole parameters, silence.

Making a store takes about two seconds, so most tests share one. Signals need processes of their own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import psutil
import pytest

from experiments import _processes, tracking

CHECKOUT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tracking.Store]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        # A blank, a hash, a percent sign and a question mark all mean something in an address.
        yield tracking.open_store(tmp_path_factory.mktemp("a b#c%20d?e"))


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def newest(store: tracking.Store, experiment: str) -> tracking.StoredRun:
    return tracking.find_runs(store, experiment)[0]


def process(script: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    hidden = {"MLFLOW_TRACKING_URI", "CI", "PYTEST_CURRENT_TEST", *tracking.MLFLOW_SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# --- one run


def test_a_finished_run_holds_all_that_was_logged(store: tracking.Store, tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    file.write_bytes(b"png")
    tags = {"kind": "point", "git_commit": "abc"}
    with tracking.run(store, "whole", "a point", tags, {"model": {"bits": 4}}) as logged:
        logged.log_metrics({"latency/ttft_ms.p50": 12.5})
        logged.log_curve("curve_batch/step_ms", [(step, step * 2.0) for step in range(1500)])
        logged.log_text("x: 1\n", "config/resolved.yaml")
        logged.log_file(file, "plots")
        logged.log_bytes(b"\x89PNG", "plots/timeline.png")
        logged.log_bytes(b"\x00", "at_the_top.bin")
        logged.set_description("| a | b |")
        logged.set_tags({"validity": "ok"})
    found = newest(store, "whole")
    assert (found.name, found.status, found.run_id) == ("a point", "FINISHED", logged.run_id)
    assert found.params == {"model.bits": "4"}
    assert found.metrics == {"latency/ttft_ms.p50": 12.5, "curve_batch/step_ms": 2998.0}
    assert found.tags["validity"] == "ok"
    assert found.tags["mlflow.note.content"] == "| a | b |"
    assert found.tags["mlflow.source.git.commit"] == "abc"
    assert tracking.read_curve(store, found.run_id, "curve_batch/step_ms")[-1] == (1499, 2998.0)
    assert tracking.read_text(store, found.run_id, "config/resolved.yaml") == "x: 1\n"
    folder = store.root / "mlruns" / "whole" / found.run_id / "artifacts"
    assert (folder / "plots" / "plot.png").read_bytes() == b"png"
    assert (folder / "plots" / "timeline.png").read_bytes() == b"\x89PNG"
    assert (folder / "at_the_top.bin").read_bytes() == b"\x00"


def test_runs_are_found_in_one_experiment_or_in_all_newest_first(store: tracking.Store) -> None:
    for study, kind in (("here", "point"), ("there", "ceilings"), ("here", "ceilings")):
        with tracking.run(store, study, f"{study} {kind}", {"kind": kind, "sought": "yes"}, {}):
            pass

    def names(experiment: str | None, filter_string: str = "tags.sought = 'yes'") -> list[str]:
        return [found.name for found in tracking.find_runs(store, experiment, filter_string)]

    assert names("here") == ["here ceilings", "here point"]
    assert names("nowhere") == []
    assert names(None) == ["here ceilings", "there ceilings", "here point"]
    assert names(None, "tags.sought = 'yes' and tags.kind = 'point'") == ["here point"]


def test_values_that_are_not_finite_are_left_out_and_reported(store: tracking.Store) -> None:
    with tracking.run(store, "finite", "r", {}, {}) as logged:
        left_out = logged.log_metrics(
            {"good": 1.0, "inf": float("inf"), "minus": float("-inf"), "nan": float("nan"), "none": None}
        )
        assert left_out == ["inf", "minus", "nan", "none"]
        assert logged.log_curve("c", [(1, 1.0), (2, float("nan"))]) == [2]
    assert newest(store, "finite").metrics == {"good": 1.0, "c": 1.0}


def test_a_deep_configuration_is_logged_whole(store: tracking.Store) -> None:
    prompt = "é" * 13_000
    config = {"data": {"prompts": [prompt, "b"]}, **{f"key{i}": i for i in range(250)}}
    with tracking.run(store, "deep", "r", {}, config):
        pass
    params = newest(store, "deep").params
    assert params == tracking.flatten(config)
    assert "".join(params[f"data.prompts.0.part_{part}"] for part in (1, 2, 3)) == prompt


def test_a_long_description_points_to_the_whole(store: tracking.Store) -> None:
    table = "| row |\n" * 3000
    with tracking.run(store, "description", "r", {}, {}) as logged:
        logged.set_description(table)
    note = newest(store, "description").tags["mlflow.note.content"]
    assert len(note) <= 8000
    assert "description.md" in note
    assert tracking.read_text(store, logged.run_id, "description.md") == table


def test_a_tag_too_long_is_refused_not_cut(store: tracking.Store) -> None:
    with (
        pytest.raises(Exception, match="exceeds the maximum length"),
        tracking.run(store, "long tag", "r", {}, {}) as logged,
    ):
        logged.set_tags({"t": "x" * 8001})


# --- how a run ends


class OutOfMemoryError(RuntimeError):
    """Stands for torch's, which has the same name."""


@pytest.mark.parametrize(
    ("error", "status", "validity"),
    [
        (ValueError("first\nsecond"), "FAILED", "failed"),
        (MemoryError(), "FAILED", "oom"),
        (OutOfMemoryError("CUDA"), "FAILED", "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "FAILED", "oom"),
        (SystemExit(0), "FAILED", "failed"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (tracking.Terminated(143), "KILLED", "interrupted"),
    ],
)
def test_an_error_is_raised_on_and_the_run_says_so(
    store: tracking.Store, error: BaseException, status: str, validity: str
) -> None:
    with pytest.raises(type(error)), tracking.run(store, "ends", "r", {}, {}):
        raise error
    found = newest(store, "ends")
    assert (found.status, found.tags["validity"]) == (status, validity)
    assert found.tags["error"].startswith(type(error).__name__)
    if status == "FAILED":
        assert "Traceback" in tracking.read_text(store, found.run_id, "error.txt")


def test_a_cause_out_of_memory_counts() -> None:
    error = ValueError("point failed")
    error.__cause__ = MemoryError()
    assert tracking.is_out_of_memory(error)
    assert not tracking.is_out_of_memory(ValueError("no memory of it"))


def test_the_first_error_survives_a_store_that_fails_too(
    store: tracking.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store.client, "set_terminated", refuse)
    with pytest.raises(ValueError, match="first") as caught, tracking.run(store, "both", "r", {}, {}):
        raise ValueError("first")
    assert any("disk full" in note for note in caught.value.__notes__)


def test_signal_handlers_come_back(store: tracking.Store) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    with tracking.run(store, "handlers", "r", {}, {}):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


def test_a_run_in_a_second_thread_works_without_handlers(store: tracking.Store) -> None:
    def log() -> None:
        with tracking.run(store, "thread", "r", {}, {}):
            pass

    thread = threading.Thread(target=log)
    thread.start()
    thread.join()
    assert newest(store, "thread").status == "FINISHED"


WAITING_RUN = """
    import sys, time
    from pathlib import Path
    from experiments import tracking
    store = tracking.open_store(Path(sys.argv[1]))
    with tracking.run(store, "signals", sys.argv[2], {}, {"a": 1}):
        print("open", flush=True)
        time.sleep(600)
"""


def test_sigterm_is_killed_and_sigkill_is_repaired_at_the_next_start(store: tracking.Store) -> None:
    numbers = {"terminated": signal.SIGTERM, "killed": signal.SIGKILL}
    processes = {name: process(WAITING_RUN, str(store.root), name) for name in numbers}
    for name, child in processes.items():
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.send_signal(numbers[name])
        _, errors = child.communicate(timeout=STOP_SECONDS)
        assert errors == ""
    assert processes["terminated"].returncode == 128 + signal.SIGTERM

    def states() -> dict[str, tuple[str, str | None]]:
        runs = tracking.find_runs(store, "signals")
        return {found.name: (found.status, found.tags.get("validity")) for found in runs}

    assert states() == {"terminated": ("KILLED", "interrupted"), "killed": ("RUNNING", None)}
    with tracking.run(store, "signals", "alive", {}, {}):
        tracking.open_store(store.root)
        assert states()["killed"] == ("KILLED", "interrupted")
        assert states()["alive"] == ("RUNNING", None)


def test_runs_of_other_hosts_and_of_other_programs_are_left_alone(store: tracking.Store) -> None:
    dead = {**_processes.process_tags(), "process.pid": str(_unused_pid())}
    reused = {**_processes.process_tags(), "process.started": "1000.00"}
    foreign = {**dead, "process.host": "0" * 16}
    experiment = tracking.experiment_id(store, "hosts")
    for name, tags in {"dead": dead, "reused": reused, "foreign": foreign, "unknown": {}}.items():
        store.client.create_run(experiment, run_name=name, tags=tags)
    tracking.open_store(store.root)
    states = {found.name: found.status for found in tracking.find_runs(store, "hosts")}
    assert states == {"dead": "KILLED", "reused": "KILLED", "foreign": "RUNNING", "unknown": "RUNNING"}


def _unused_pid() -> int:
    return next(pid for pid in range(2**22 - 1, 1, -1) if not psutil.pid_exists(pid))


# --- the store


def test_four_processes_open_a_fresh_store_together(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from experiments import tracking
        store = tracking.open_store(Path(sys.argv[1]))
        with tracking.run(store, "together", sys.argv[2], {}, {"a": 1}) as logged:
            logged.log_metrics({"m": 1.0})
    """
    root = tmp_path / "fresh"
    processes = [process(script, str(root), str(number)) for number in range(4)]
    errors = [child.communicate(timeout=STOP_SECONDS)[1] for child in processes]
    assert errors == [""] * 4
    assert [child.returncode for child in processes] == [0] * 4
    runs = tracking.find_runs(tracking.open_store(root), "together")
    assert sorted(found.name for found in runs) == ["0", "1", "2", "3"]
    assert {found.status for found in runs} == {"FINISHED"}


def test_a_first_use_prints_nothing_and_asks_no_network(tmp_path: Path) -> None:
    script = """
        import sys, time
        calls = []
        def hook(event, arguments):
            if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
                calls.append((event, arguments))
        sys.addaudithook(hook)
        from pathlib import Path
        from experiments import tracking
        store = tracking.open_store(Path(sys.argv[1]))
        with tracking.run(store, "silent", "r", {}, {"a": 1}) as logged:
            logged.log_metrics({"m": 1.0})
            logged.log_text("t", "t.txt")
        tracking.read_text(store, logged.run_id, "t.txt")
        time.sleep(1)  # telemetry would speak from a thread of its own
        if calls:
            raise SystemExit(f"network: {calls}")
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    child = process(script, str(tmp_path / "root"), cwd=elsewhere)
    assert child.communicate(timeout=STOP_SECONDS) == ("", "")
    assert child.returncode == 0
    assert list(elsewhere.iterdir()) == []
    left = {path.name for path in (tmp_path / "root").iterdir()}
    assert left == {"mlflow.db", "mlflow.db.lock", "mlruns"}


def test_every_working_directory_has_the_same_store(
    store: tracking.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking.project_root() == CHECKOUT
    again = tracking.open_store(store.root)
    assert again.uri == store.uri
    with tracking.run(again, "elsewhere", "r", {}, {}) as logged:
        logged.log_text("t", "t.txt")
    assert newest(store, "elsewhere").run_id == logged.run_id
    assert (store.root / "mlruns" / "elsewhere" / logged.run_id / "artifacts" / "t.txt").is_file()
    assert list(tmp_path.iterdir()) == []


def test_an_installed_copy_uses_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "site-packages/experiments/tracking.py"))
    monkeypatch.chdir(tmp_path)
    assert tracking.project_root() == tmp_path


def test_the_environment_names_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/team.db")
    assert tracking.store_uri(CHECKOUT) == f"sqlite:///{tmp_path}/team.db"
    assert tracking.artifact_root(CHECKOUT, tracking.store_uri(CHECKOUT)) == tmp_path / "mlruns"


def test_a_store_of_an_older_mlflow_is_copied_and_upgraded(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    older = _build_older_schema(database)
    opened = tracking.open_store(tmp_path)
    with tracking.run(opened, "upgraded", "r", {}, {}):
        pass
    assert newest(opened, "upgraded").status == "FINISHED"
    assert tracking._schema_revision(database) != older
    assert tracking._schema_revision(tmp_path / f"mlflow.db.{older}.bak") == older


def _build_older_schema(database: Path) -> str:
    from alembic import command
    from alembic.script import ScriptDirectory

    tracking._load_mlflow()
    tools = tracking._schema_tools()
    config = tools._get_alembic_config(f"sqlite:///{database}")
    older = list(ScriptDirectory.from_config(config).walk_revisions())[3].revision
    engine = tools.create_sqlalchemy_engine(f"sqlite:///{database}")
    tools.InitialBase.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, older)
    engine.dispose()
    return str(older)


def test_what_a_killed_first_start_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db.new").write_bytes(b"half a database")
    (tmp_path / "mlflow.db").touch()
    tracking.open_store(tmp_path)
    assert not (tmp_path / "mlflow.db.new").exists()


def test_a_file_that_is_no_store_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database" * 100)
    with pytest.raises(tracking.StoreError, match="can't open the experiment store") as caught:
        tracking.open_store(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_store_of_a_newer_mlflow_gives_one_line(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('future')")
    with pytest.raises(tracking.StoreError, match="schema future, which this MLflow can't upgrade") as caught:
        tracking.open_store(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_down_gives_one_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")  # the discard port
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(tracking.StoreError, match="Connection refused") as caught:
        tracking.open_store(tmp_path)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_addresses_are_shown_without_passwords() -> None:
    assert tracking.public_uri("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert tracking.public_uri("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


# --- experiments


def test_an_experiment_keeps_its_artifacts_under_the_root(store: tracking.Store) -> None:
    made = store.client.get_experiment(tracking.experiment_id(store, "study/part one"))
    assert Path(unquote(urlparse(made.artifact_location).path)) == store.root / "mlruns/study/part one"
    default = store.client.get_experiment("0")
    assert Path(unquote(urlparse(default.artifact_location).path)) == store.root / "mlruns/0"
    assert not list((store.root / "mlruns").glob("[0-9]*/meta.yaml"))


def test_a_deleted_experiment_is_restored(store: tracking.Store) -> None:
    identity = tracking.experiment_id(store, "deleted")
    store.client.delete_experiment(identity)
    assert tracking.experiment_id(store, "deleted") == identity
    assert store.client.get_experiment(identity).lifecycle_stage == "active"


@pytest.mark.parametrize("name", ["", " ", "../out", "/absolute", "a//b"])
def test_an_experiment_name_that_leaves_the_folder_is_refused(store: tracking.Store, name: str) -> None:
    with pytest.raises(tracking.StoreError, match="no experiment name"):
        tracking.experiment_id(store, name)


# --- flatten


@dataclasses.dataclass
class Point:
    bits: int
    name: str | None = None


def test_flatten_joins_keys_with_dots() -> None:
    config = {
        "model": {"target": "m", "weights": Point(4)},
        "lengths": [1, {"k": 2.5}],
        "on": True,
        "empty": {"map": {}, "list": [], "text": ""},
        "path": Path("a/b"),
        3: "three",
    }
    assert tracking.flatten(config) == {  # type: ignore[arg-type]
        "model.target": "m",
        "model.weights.bits": "4",
        "model.weights.name": "null",
        "lengths.0": "1",
        "lengths.1.k": "2.5",
        "on": "true",
        "empty.map": "{}",
        "empty.list": "[]",
        "empty.text": "",
        "path": "a/b",
        "3": "three",
    }


def test_flatten_is_stable_and_takes_hydra_configurations() -> None:
    from omegaconf import OmegaConf

    flat = tracking.flatten(OmegaConf.create({"a": {"b": [1, None]}, "c": "${a.b.0}"}))
    assert flat == {"a.b.0": "1", "a.b.1": "null", "c": "1"}
    assert tracking.flatten(flat) == flat


def test_flatten_refuses_what_would_get_lost() -> None:
    with pytest.raises(ValueError, match=r"both called 'a\.b'"):
        tracking.flatten({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(ValueError, match="above 250 characters"):
        tracking.flatten({"k" * 251: 1})


def test_flatten_splits_only_above_the_limit() -> None:
    assert tracking.flatten({"a": "x" * 6000}) == {"a": "x" * 6000}
    assert tracking.flatten({"a": "x" * 6001}) == {"a.part_1": "x" * 6000, "a.part_2": "x"}
