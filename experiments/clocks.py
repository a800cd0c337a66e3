"""How fast this machine may run and does: clocks, power, energy, throttling, cache size, of CPU and GPU.

Every value is plain JSON; whatever can't be read (a virtual machine hides most of it, reading energy often
needs root) is None, and nothing here raises. Sources: Linux sysfs (cpufreq, intel-rapl, thermal_throttle),
psutil elsewhere, nvidia-smi. `filesystem` is for tests.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/")
CPU_FOLDER = "sys/devices/system/cpu"
COMMAND_SECONDS = 10.0
KHZ_PER_MHZ = 1000
UJ_PER_J = 1_000_000
SIZE_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
# Our name of a number: nvidia-smi's. The units are nvidia-smi's own (MHz, W, degrees Celsius).
GPU_NUMBERS = {
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "max_memory_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
# The newer name first: a driver that doesn't know one of the fields refuses the whole query.
GPU_THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of nvml.h, nvmlClocksEventReason*. Idle counts: a clock read while idle says nothing about a run.
GPU_THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "applications_clocks_setting",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal_slowdown",
    0x40: "hardware_thermal_slowdown",
    0x80: "hardware_power_brake",
    0x100: "display_clock_setting",
}


def read_clocks(filesystem: Path = ROOT) -> dict[str, Any]:
    """Clocks (MHz), power (W) and energy counters (microjoules) now; milliseconds, more with a GPU."""
    return {
        "cpu": _cpu(filesystem),
        "power": _power_supply(),
        "energy": _energy_zones(filesystem),
        "transparent_huge_pages": _transparent_huge_pages(filesystem),
        "gpu": _gpus(),
    }


def energy_j(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Joules that all processor packages used between two `read_clocks`; None where a counter is missing.

    A counter that wrapped around is followed once. At 100 W it takes 43 minutes to wrap on common
    processors (2^32 x 61 microjoules): read at least that often.
    """
    first, last = _package_zones(before), _package_zones(after)
    if not first or first.keys() != last.keys():
        return None
    used_uj = [_used_uj(first[zone], last[zone]) for zone in first]
    known_uj = [used for used in used_uj if used is not None]
    return sum(known_uj) / UJ_PER_J if len(known_uj) == len(used_uj) else None


def cache_bytes(filesystem: Path = ROOT) -> int | None:
    """Bytes of one last-level cache: the largest of those that the cores we may use have, None if unknown.

    A processor of several core complexes has one per complex; a core reads through its own only.
    """
    found = [
        (level, size)
        for core in usable_cores()
        for index in _listing(_core_folder(filesystem, core) / "cache", "index*")
        if (level := _integer(index / "level")) is not None
        and (size := _size_bytes(read_text(index / "size"))) is not None
        and read_text(index / "type").strip() != "Instruction"
    ]
    return max(found)[1] if found else None


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def read_text(path: Path) -> str:
    """A file's text, empty where it can't be read."""
    with suppress(OSError, UnicodeError):
        return path.read_text(encoding="utf-8")
    return ""


def command_output(*words: str) -> str | None:
    """A command's output, None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout.strip()


def _cpu(filesystem: Path) -> dict[str, Any]:
    folders = [_core_folder(filesystem, core) / "cpufreq" for core in sorted(usable_cores())]
    return {
        "packages": _packages(filesystem),
        # The driver gives the governor its meaning: intel_pstate's powersave still goes to full speed.
        "driver": _agreed(read_text(folder / "scaling_driver") for folder in folders),
        "governor": _agreed(read_text(folder / "scaling_governor") for folder in folders),
        "energy_preference": _agreed(
            read_text(folder / "energy_performance_preference") for folder in folders
        ),
        "turbo": _turbo(filesystem),
        "last_level_cache_bytes": cache_bytes(filesystem),
    }


def _packages(filesystem: Path) -> list[dict[str, Any]]:
    """One entry per processor package, over those of its cores that we may use."""
    packages: dict[int | None, list[int]] = {}
    for core in sorted(usable_cores()):
        package = _integer(_core_folder(filesystem, core) / "topology/physical_package_id")
        packages.setdefault(package, []).append(core)
    current_mhz = _current_mhz(filesystem)
    found = [
        {
            "package": package,
            "cores": len(cores),
            "current_mhz": _mean(current_mhz[core] for core in cores if core in current_mhz),
            # The limits that the system has set, which may be narrower than the hardware's.
            "min_mhz": min(_limits_mhz(filesystem, cores, "scaling_min_freq"), default=None),
            "max_mhz": max(_limits_mhz(filesystem, cores, "scaling_max_freq"), default=None),
            **_throttles(filesystem, cores),
        }
        for package, cores in packages.items()
    ]
    nothing = all(entry["current_mhz"] is None for entry in found)
    return _psutil_package() if nothing and filesystem == ROOT else found


def _psutil_package() -> list[dict[str, Any]]:
    """Systems without sysfs: the whole machine as one package of unknown number."""
    frequency = None
    with suppress(Exception):  # psutil raises various errors where a virtual machine hides the clock
        frequency = psutil.cpu_freq()
    current, low, high = (frequency.current, frequency.min, frequency.max) if frequency else (0.0, 0.0, 0.0)
    return [
        {
            "package": None,
            "cores": len(usable_cores()),
            "current_mhz": current or None,  # psutil writes 0 for unknown
            "min_mhz": low or None,
            "max_mhz": high or None,
            "core_throttles": None,
            "package_throttles": None,
        }
    ]


def _current_mhz(filesystem: Path) -> dict[int, float]:
    """MHz of each core now, where known. /proc/cpuinfo has a fixed number in many virtual machines."""
    found = dict(_cpuinfo_mhz(read_text(filesystem / "proc/cpuinfo")))
    for core in usable_cores():
        khz = _integer(_core_folder(filesystem, core) / "cpufreq/scaling_cur_freq")
        if khz is not None:
            found[core] = khz / KHZ_PER_MHZ
    return found


def _cpuinfo_mhz(text: str) -> Iterable[tuple[int, float]]:
    for paragraph in text.split("\n\n"):
        core = re.search(r"^processor\s*:\s*(\d+)$", paragraph, re.MULTILINE)
        mhz = re.search(r"^cpu MHz\s*:\s*(\d+(?:\.\d+)?)$", paragraph, re.MULTILINE)
        if core and mhz:
            yield int(core.group(1)), float(mhz.group(1))


def _limits_mhz(filesystem: Path, cores: Iterable[int], name: str) -> list[float]:
    limits = [_integer(_core_folder(filesystem, core) / "cpufreq" / name) for core in cores]
    return [khz / KHZ_PER_MHZ for khz in limits if khz is not None]


def _throttles(filesystem: Path, cores: Iterable[int]) -> dict[str, int | None]:
    """How often heat slowed the cores, and the package as a whole, since boot (Intel only)."""
    folders = [_core_folder(filesystem, core) / "thermal_throttle" for core in cores]
    of_cores = [_integer(folder / "core_throttle_count") for folder in folders]
    of_package = [_integer(folder / "package_throttle_count") for folder in folders]
    known = [count for count in of_cores if count is not None]
    return {
        "core_throttles": sum(known) if known else None,
        # Each core counts the events of the package that it saw: their sum would count one many times.
        "package_throttles": max((count for count in of_package if count is not None), default=None),
    }


def _turbo(filesystem: Path) -> bool | None:
    """Whether clocks above the base clock are allowed."""
    no_turbo = read_text(filesystem / CPU_FOLDER / "intel_pstate/no_turbo").strip()
    if no_turbo in ("0", "1"):
        return no_turbo == "0"
    boost = read_text(filesystem / CPU_FOLDER / "cpufreq/boost").strip()
    return boost == "1" if boost in ("0", "1") else None


def _power_supply() -> dict[str, Any]:
    """Mains or battery. A machine without a battery says nothing: both are None."""
    with suppress(Exception):  # psutil lacks the function on some systems, and some batteries are odd
        battery = psutil.sensors_battery()
        if battery is not None:
            return {"on_mains": battery.power_plugged, "battery_percent": round(battery.percent, 1)}
    return {"on_mains": None, "battery_percent": None}


def _energy_zones(filesystem: Path) -> list[dict[str, Any]] | None:
    """Energy counters of the packages and their parts (cores, memory); None without any.

    `max_energy_uj` is where a counter starts again from 0. AMD processors appear under the same names.
    """
    # The twin "intel-rapl-mmio" counts the same packages again, and isn't matched.
    zones = _listing(filesystem / "sys/class/powercap", "intel-rapl:*")
    found = [
        {
            "zone": zone.name,
            "name": read_text(zone / "name").strip() or None,
            "energy_uj": _integer(zone / "energy_uj"),
            "max_energy_uj": _integer(zone / "max_energy_range_uj"),
        }
        for zone in zones
    ]
    return found or None


def _package_zones(clocks: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Zones of whole packages: cores and graphics are in them, the platform's (psys) holds them."""
    zones = clocks.get("energy") or []
    return {zone["zone"]: zone for zone in zones if str(zone["name"]).startswith("package")}


def _used_uj(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    start, end, wraps_at = before["energy_uj"], after["energy_uj"], after["max_energy_uj"]
    if start is None or end is None:
        return None
    if end >= start:
        return end - start
    return None if wraps_at is None else end - start + wraps_at


def _transparent_huge_pages(filesystem: Path) -> str | None:
    """The mode in brackets: always, madvise or never."""
    modes = read_text(filesystem / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    return chosen.group(1) if chosen else None


def _gpus() -> list[dict[str, Any]] | None:
    """NVIDIA GPUs of the machine, used or not; None without nvidia-smi or without a GPU."""
    for throttle_field in GPU_THROTTLE_FIELDS:
        fields = ["index", "name", *GPU_NUMBERS.values(), "persistence_mode", throttle_field]
        query = f"--query-gpu={','.join(fields)}"
        table = command_output("nvidia-smi", query, "--format=csv,noheader,nounits")
        if table is not None:
            rows = csv.reader(table.splitlines(), skipinitialspace=True)
            return [_gpu(row) for row in rows if len(row) == len(fields)] or None
    return None


def _gpu(row: list[str]) -> dict[str, Any]:
    index, name, *numbers, persistence, reasons = (cell.strip() for cell in row)
    return {
        "index": int(index) if index.isdecimal() else None,
        "name": name,
        **{ours: _number(cell) for ours, cell in zip(GPU_NUMBERS, numbers, strict=True)},
        "persistence": {"enabled": True, "disabled": False}.get(persistence.lower()),
        "throttle_reasons": _throttle_reasons(reasons),
    }


def _throttle_reasons(mask: str) -> list[str] | None:
    """The names of the bits of a hexadecimal mask, an unknown bit as its number; empty: at full speed."""
    if not re.fullmatch(r"0x[0-9a-fA-F]+", mask):
        return None
    bits = int(mask, 16)
    every = [1 << place for place in range(bits.bit_length())]
    return [GPU_THROTTLE_REASONS.get(bit, hex(bit)) for bit in every if bits & bit]


def _core_folder(filesystem: Path, core: int) -> Path:
    return filesystem / CPU_FOLDER / f"cpu{core}"


def _listing(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def _integer(path: Path) -> int | None:
    with suppress(ValueError):
        return int(read_text(path))
    return None


def _number(text: str) -> float | None:
    """nvidia-smi writes [N/A], [Not Supported] and the like for what it can't read."""
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def _size_bytes(text: str) -> int | None:
    """Bytes of a size such as 32768K."""
    size = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(size.group(1)) * SIZE_UNITS[size.group(2)] if size else None


def _agreed(texts: Iterable[str]) -> str | None:
    """What the cores say, each different answer once, joined by commas."""
    return ",".join(sorted({text.strip() for text in texts} - {""})) or None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return round(sum(known) / len(known), 3) if known else None
