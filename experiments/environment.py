"""What a result was measured on: code, packages, processor, quotas, accelerator.

Every value is plain JSON. Whatever can't be found out is None; nothing here raises. The host's name is
not recorded: `host_id` is a hash that tells hosts apart.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from experiments._processes import host_id
from experiments.clocks import command_output, read_clocks, read_text, usable_cores
from experiments.tracking import project_root

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "optimum-quanto",
    "mlflow",
    "hydra-core",
    "torchao",
    "numpy",
    "scipy",
    "datasets",
    "matplotlib",
    "gguf",
)
# The instruction sets that decide which kernels run.
CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "asimd",
    "sve",
)
MIB = 1024 * 1024
# Version 1 of the control groups writes about 2^63 for no limit.
LEAST_UNLIMITED_BYTES = 2**62


def collect() -> dict[str, Any]:
    """The environment of this process as nested JSON values.

    Well under a second once torch is loaded; with a GPU, nvidia-smi may add one.
    """
    return {
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host_id": host_id(),
        "cpu": _cpu(),
        "memory": _memory(),
        "clocks": read_clocks(),
        "gpu": _gpu(),
        "torch_threads": _torch_threads(),
    }


def git_state() -> dict[str, Any]:
    """Commit of the checkout, and whether anything differs from it; None where there is no checkout."""
    return _git(project_root())


def cpu_name() -> str:
    """The processor's name as far as the system tells it."""
    return str(_cpu()["model"] or "cpu")


def quota_cores() -> int:
    """Whole cores that this process may keep busy: affinity and cgroup quota, at least 1."""
    quota = cgroup_quota()
    cores = _affinity_cores() if quota is None else min(_affinity_cores(), math.floor(quota))
    return max(1, cores)


def default_threads() -> int:
    """Threads to compute with: OMP_NUM_THREADS where set, never above `quota_cores`."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(quota_cores(), int(asked)) if asked.isdecimal() and int(asked) > 0 else quota_cores()


def cgroup_quota(filesystem: Path = Path("/")) -> float | None:
    """Cores that the control groups (version 1 or 2) allow this process, None for no limit.

    A limit anywhere above the process counts, so the smallest wins. `filesystem` is for tests.
    """
    quotas = [_quota_of(folder) for folder in _cgroup_folders(filesystem, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def cgroup_memory_limit(filesystem: Path = Path("/")) -> int | None:
    """Bytes of memory that the control groups (version 1 or 2) allow this process, None for no limit."""
    limits = [_memory_limit_of(folder) for folder in _cgroup_folders(filesystem, "memory")]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroup_folders(filesystem: Path, controller: str) -> list[Path]:
    mount = filesystem / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in read_text(filesystem / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree, in a subfolder where version 1 is mounted too. Inside a container the
        # tree often starts at the container's own group: then only the last of these folders exists.
        bases = [mount / controllers] if controllers else [mount, mount / "unified"]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [base.joinpath(*parts[:depth]) for base in bases for depth in range(len(parts), -1, -1)]
    return folders


def _quota_of(folder: Path) -> float | None:
    limit = read_text(folder / "cpu.max").split()
    if not limit:
        limit = [
            *read_text(folder / "cpu.cfs_quota_us").split(),
            *read_text(folder / "cpu.cfs_period_us").split(),
        ]
    if len(limit) != 2 or not all(number.isdecimal() for number in limit) or limit[1] == "0":
        return None  # version 2 writes max, version 1 writes -1 for no limit
    return int(limit[0]) / int(limit[1])


def _memory_limit_of(folder: Path) -> int | None:
    text = (read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")).strip()
    if not text.isdecimal() or int(text) >= LEAST_UNLIMITED_BYTES:
        return None  # version 2 writes max for no limit
    return int(text)


def _affinity_cores() -> int:
    return len(usable_cores())


def _cpu() -> dict[str, Any]:
    info = read_text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1).strip() if model else platform.processor() or None,
        "features": [name for name in CPU_FEATURES if name in present],
        "virtualized": _virtualized(info),
        "physical_cores": psutil.cpu_count(logical=False),
        "visible_cores": os.cpu_count(),
        "affinity_cores": _affinity_cores(),
        "cgroup_quota": cgroup_quota(),
        "quota_cores": quota_cores(),
        "default_threads": default_threads(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def _virtualized(cpuinfo: str) -> bool | None:
    """Whether a hypervisor runs below; None where /proc/cpuinfo wouldn't say (anything but x86)."""
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return "hypervisor" in flags.group(1).split() if flags else None


def _memory() -> dict[str, int | None]:
    memory, limit = psutil.virtual_memory(), cgroup_memory_limit()
    return {
        "total_mib": memory.total // MIB,
        "available_mib": memory.available // MIB,
        "cgroup_limit_mib": None if limit is None else limit // MIB,
    }


def _git(root: Path) -> dict[str, Any]:
    """Commit and whether anything differs from it (untracked files count); None outside a checkout."""
    top = command_output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # a checkout around an installed copy isn't ours
        return {"commit": None, "dirty": None}
    commit = command_output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = command_output("git", "-C", str(root), "--no-optional-locks", "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _gpu() -> dict[str, Any] | None:
    """The CUDA devices that torch sees, None without one."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception:  # a broken driver must not stop a measurement on the CPU
        return None
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "devices": [{"name": d.name, "memory_mib": d.total_memory // MIB} for d in devices],
        "driver": driver.splitlines()[0].strip() if driver else None,
        "cuda": torch.version.cuda,
    }


def _torch_threads() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.get_num_threads()


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
