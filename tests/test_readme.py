"""The README's code runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from experiments import measured_point, plugins
from experiments.config import RunConfig
from experiments.memory import ProcessMemory
from specdec.types import DraftProposal

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _memory(config: RunConfig) -> ProcessMemory:
    return ProcessMemory(peak_mib=3.0, steady_mib=2.0, base_mib=1.0)


@pytest.mark.parametrize("index", [0, 1])
def test_library_example_runs(
    index: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    # Beside a busy process a second thread makes the bundled model ten times slower.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # A process of its own takes seconds.
    monkeypatch.setattr(measured_point, "measure_memory", _memory)
    exec(compile(BLOCKS[index], f"README block {index}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_whole_drafter_is_a_plugin(tmp_path: Path) -> None:
    path = tmp_path / "echo.py"
    path.write_text(BLOCKS[2], encoding="utf-8")
    try:
        plugins.register_all(str(path))
        options = plugins.default_options("drafter", "echo")
        assert options.times == 2
        row = type("Row", (), {"token_ids": [5, 7]})()
        drafter = options.build(type("Context", (), {"device": "cpu"})())
        proposal = drafter.propose([row], [4], None, None)
        assert isinstance(proposal, DraftProposal)
        assert proposal.token_ids.tolist() == [[7, 7]]
    finally:
        sys.modules.pop("echo", None)


def test_first_screen_has_the_two_commands() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert README.index(commands[1]) < 2000
    ci = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    test_command = commands[1].partition("&& ")[2].replace(".venv/bin/", "")
    assert test_command in ci.replace('"$venv/bin/', "").replace('"', "")
