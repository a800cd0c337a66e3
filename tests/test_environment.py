"""What is recorded about the machine, and the thread count that stays within its quotas."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from experiments import environment


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_collect_is_json_with_the_promised_parts() -> None:
    found = json.loads(json.dumps(environment.collect()))
    assert set(found) == {
        "git",
        "python",
        "packages",
        "platform",
        "host_id",
        "cpu",
        "memory",
        "gpu",
        "torch_threads",
    }
    assert found["packages"]["mlflow"]
    assert found["cpu"]["visible_cores"] == os.cpu_count()
    assert 1 <= found["cpu"]["quota_cores"] <= os.cpu_count()
    assert found["memory"]["total_mib"] > found["memory"]["available_mib"] > 0
    assert found["torch_threads"] >= 1


def test_the_hosts_name_is_not_recorded() -> None:
    found = environment.collect()
    assert len(found["host_id"]) == 16
    assert socket.gethostname() not in json.dumps({**found, "platform": None, "git": None, "cpu": None})


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/host/id\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/id\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
    ids=["v2", "v2-max", "v2-parent", "v2-own-root", "v2-outside", "v1", "v1-none", "no-cgroups"],
)
def test_cgroup_quotas(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert environment.cgroup_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("affinity", "quota", "asked", "threads"),
    [
        (8, None, "", 8),
        (8, 2.9, "", 2),
        (8, 0.5, "", 1),
        (4, 16.0, "", 4),
        (8, 4.0, "2", 2),
        (8, 4.0, "64", 4),
        (8, 4.0, "3,1", 3),
        (8, 4.0, "0", 4),
        (8, 4.0, "many", 4),
    ],
)
def test_threads_stay_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float | None, asked: str, threads: int
) -> None:
    monkeypatch.setattr(environment, "_affinity_cores", lambda: affinity)
    monkeypatch.setattr(environment, "cgroup_quota", lambda: quota)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert environment.default_threads() == threads


def test_git_says_commit_and_changes(tmp_path: Path) -> None:
    nothing = {"commit": None, "dirty": None}
    assert environment._git(tmp_path) == nothing

    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-m", "first")
    first = environment._git(tmp_path)
    assert len(first["commit"]) == 40
    assert first["dirty"] is False
    (tmp_path / "a").write_text("b")
    assert environment._git(tmp_path)["dirty"] is True
    (tmp_path / "inner").mkdir()
    assert environment._git(tmp_path / "inner") == nothing


def test_missing_tools_and_packages_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._git(tmp_path) == {"commit": None, "dirty": None}
    assert environment._version("no-such-package-anywhere") is None
