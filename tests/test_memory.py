"""Memory of a strategy in its own process: what is reported, and how a child that fails, or lives too long, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import memory
from experiments.config import RunConfig, compose_run
from experiments.memory import MemoryProbeError, ProcessMemory, measure_memory

pytestmark = pytest.mark.usefixtures("one_thread")

# Of the wide model: two layers of three float32 matrices.
WIDE_SIZES = {"hidden_size": 256, "intermediate_size": 8192}
WIDE_MIB = 2 * 3 * 256 * 8192 * 4 / 2**20

# Stands in for a configuration: its plug-in never gets to its end.
ENDLESS_PARENT = """
from dataclasses import dataclass
from experiments.memory import measure_memory

@dataclass
class Config:
    plugin: str = "endless.py"

measure_memory(Config())
"""
ENDLESS_PLUGIN = """
import os, pathlib, time
pathlib.Path("child.part").write_text(str(os.getpid()))
os.replace("child.part", "child")
time.sleep(60)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    save_model(folder / "target")
    save_model(folder / "wide", **WIDE_SIZES)
    save_prompts(folder / "prompts.jsonl", repeating_prompts([3, 6, 5]))
    return folder


def config(model: str | Path) -> RunConfig:
    return compose_run(
        [
            "strategy=prompt_lookup",
            f"model.target={model}",
            "workload=jsonl",
            "workload.path=prompts.jsonl",
            "workload.max_new_tokens=8",
            "batch_size=2",
            "dtype=fp32",
            "device=cpu",
            "threads=1",
        ]
    )


class Probes:
    """Real probes from a folder that is not the checkout; `imported` is what their processes imported."""

    def __init__(self, root: Path) -> None:
        self.imported: list[str] = []
        really_run: Any = subprocess.run

        def run_and_note(*arguments: Any, **options: Any) -> Any:
            done = really_run(*arguments, **options)
            self.imported += [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)  # paths are relative to where the parent is
            patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
            patch.setattr(subprocess, "run", run_and_note)
            self.small = measure_memory(config("target"))
            self.wide = measure_memory(config("wide"))


@pytest.fixture(scope="module")
def probes(root: Path) -> Probes:
    return Probes(root)


# --- what is reported


def test_peak_steady_and_base_are_in_order(probes: Probes) -> None:
    for found in (probes.small, probes.wide):
        assert found.peak_mib >= found.steady_mib > found.base_mib > 0


@pytest.mark.skipif(not memory._forget_resident(), reason="this system does not forget a peak")
def test_each_phase_has_a_peak_of_its_own(probes: Probes) -> None:
    for found in (probes.small, probes.wide):
        phases = (found.peak_load_mib, found.peak_prefill_mib, found.peak_decode_mib)
        known = [phase for phase in phases if phase is not None]
        assert len(known) == 3
        assert max(known) <= found.peak_mib < max(known) + 1
        assert min(known) > found.base_mib
    wide, small = (found.peak_prefill_mib for found in (probes.wide, probes.small))
    assert wide is not None
    assert small is not None
    assert wide - small > 0.9 * WIDE_MIB  # weights that were mapped are read at last


def test_a_system_that_forgets_no_peak_has_no_phases() -> None:
    assert set(ProcessMemory(3.0, 2.0, 1.0).metrics()) == {
        "memory/peak_mib",
        "memory/steady_mib",
        "memory/base_mib",
    }


def test_a_wider_model_needs_as_much_more_as_its_weights(probes: Probes) -> None:
    more = probes.wide.steady_mib - probes.small.steady_mib
    assert 0.9 * WIDE_MIB < more < 1.5 * WIDE_MIB
    assert probes.wide.peak_mib - probes.small.peak_mib > 0.9 * WIDE_MIB
    assert abs(probes.wide.base_mib - probes.small.base_mib) < 0.2 * WIDE_MIB


def test_the_child_holds_no_experiment_store(probes: Probes) -> None:
    packages = {module.partition(".")[0] for module in probes.imported}
    assert {"torch", "transformers", "experiments"} <= packages
    assert "mlflow" not in packages


def test_the_longest_block_is_decoded_with_all_of_its_rows(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments.point import prepare

    monkeypatch.chdir(root)
    point = prepare(config("target"))
    decoder, block = memory._strategy_alone(point)
    assert [request.request_id for request in block] == [0, 1]  # the second prompt is the longest
    assert decoder.num_slots == 2


def test_resident_memory_is_counted_in_mib() -> None:
    peak_mib, now_mib = memory._resident_mib()
    assert now_mib == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.05)
    assert peak_mib >= now_mib
    assert memory._max_rss_mib() > now_mib / 2


# --- a child that fails


def line_of(caught: pytest.ExceptionInfo[MemoryProbeError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_cant_be_read_are_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    save_model(root / "corrupt")
    (root / "corrupt" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(MemoryProbeError) as caught:
        measure_memory(config("corrupt"))
    assert line_of(caught).startswith("model.target=corrupt: can't be loaded")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; print('{}'); sys.exit('a\\n\\n the  reason \\n')", "the reason"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, perhaps for lack of memory"),
        ("import os; os.kill(os.getpid(), 6)", "killed by SIGABRT"),
        ("pass", "gave no answer but []"),
        ("print('hello')", "gave no answer but ['hello']"),
        ("print('{}')", "gave no answer but ['{}']"),
        ("import time; time.sleep(60)", "took longer than 0.5 s"),
    ],
)
def test_a_child_without_an_answer_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str
) -> None:
    monkeypatch.setattr(memory, "_child_command", lambda: [sys.executable, "-S", "-c", program])
    with pytest.raises(MemoryProbeError) as caught:
        measure_memory(config(root / "target"), timeout_s=0.5 if "sleep" in program else 30)
    assert line_of(caught) == expected


def test_a_child_that_cant_be_started_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_child_command", lambda: [str(root / "no_python")])
    with pytest.raises(MemoryProbeError) as caught:
        measure_memory(config(root / "target"))
    assert line_of(caught).startswith("can't be started: ")


def test_what_libraries_print_before_the_answer_is_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = 'print(\'hello\'); print(\'{"peak_mib": 3, "steady_mib": 2.5, "base_mib": 1}\')'
    monkeypatch.setattr(memory, "_child_command", lambda: [sys.executable, "-S", "-c", program])
    assert measure_memory(config(root / "target")) == ProcessMemory(3, 2.5, 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("kv=x:\n no"), "kv=x: no"),
        (RuntimeError("some\nthing"), "RuntimeError: some thing"),
        (MemoryError(), "out of memory: MemoryError"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "out of memory: ",
        ),
    ],
)
def test_the_child_explains_itself_in_one_line(error: Exception, expected: str) -> None:
    assert memory._explained(error).startswith(expected)
    assert "\n" not in memory._explained(error)


# --- a parent that ends


@pytest.mark.skipif(os.name != "posix", reason="the watch is for POSIX")
def test_a_parent_that_is_killed_takes_the_child_along(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS_PLUGIN)
    parent = subprocess.Popen([sys.executable, "-c", ENDLESS_PARENT], cwd=tmp_path)
    try:
        wait_until((tmp_path / "child").exists, seconds=30)
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.ppid() == parent.pid
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=10)


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
