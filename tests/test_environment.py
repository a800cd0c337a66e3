"""What is recorded about the machine, and the thread count that stays within its quotas."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

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
        "clocks",
        "gpu",
        "torch_threads",
    }
    assert {"mlflow", "scipy", "datasets", "matplotlib", "torchao"} <= set(found["packages"])
    assert found["packages"]["mlflow"]
    assert found["cpu"]["visible_cores"] == os.cpu_count()
    assert 1 <= found["cpu"]["quota_cores"] <= os.cpu_count()
    assert found["memory"]["total_mib"] > found["memory"]["available_mib"] > 0
    assert found["cpu"]["physical_cores"] is None or found["cpu"]["physical_cores"] >= 1
    assert found["cpu"]["virtualized"] in (True, False, None)
    assert "cgroup_limit_mib" in found["memory"]
    assert set(found["clocks"]) == {"cpu", "power", "energy", "transparent_huge_pages", "gpu"}
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


def test_m16_threads_stay_within_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    monkeypatch.setattr(environment, "cgroup_quota", partial(environment.cgroup_quota, groups))
    monkeypatch.setattr(environment, "usable_cores", lambda: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for asked in ("", "8"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        found = environment.collect()
        expected = {"visible_cores": 8, "affinity_cores": 8, "cgroup_quota": 1.5, "quota_cores": 1}
        assert {name: found["cpu"][name] for name in expected} == expected
        assert found["cpu"]["default_threads"] == environment.default_threads() == 1
        assert found["torch_threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1073741824\n"}, 2**30),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/memory.max": "1000\n",
                "sys/fs/cgroup/pod/box/memory.max": "2000\n",
            },
            1000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/c\n0::/\n",
                "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            5000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
        ),
        ({}, None),
    ],
    ids=["v2", "v2-max", "v2-parent", "v1", "v1-none", "no-cgroups"],
)
def test_cgroup_memory_limits(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert environment.cgroup_memory_limit(write(tmp_path, files)) == limit


def test_the_memory_limit_stands_beside_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cgroup_memory_limit", lambda: 3 * 2**30 + 1)
    assert environment._memory()["cgroup_limit_mib"] == 3072


@pytest.mark.parametrize(
    ("cpuinfo", "virtualized"),
    [
        ("processor\t: 0\nflags\t\t: fpu vme hypervisor avx2\n", True),
        ("processor\t: 0\nflags\t\t: fpu vme avx2\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd sve\n", None),
        ("", None),
    ],
    ids=["virtual", "bare", "arm", "unreadable"],
)
def test_a_hypervisor_is_seen(cpuinfo: str, virtualized: bool | None) -> None:
    assert environment._virtualized(cpuinfo) is virtualized


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
