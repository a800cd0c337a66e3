"""Clocks, power and caches read from made-up file systems and a made-up nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import clocks
from experiments.clocks import cache_bytes, energy_j, read_clocks

CPU = "sys/devices/system/cpu"
RAPL = "sys/class/powercap"
GPU_ROW = "0, NVIDIA H200, 1980, 1980, 3201, 3201, 431.25, 700.00, 54, Enabled, 0x0000000000000004"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def core_files(core: int, package: int, khz: int, throttles: tuple[int, int] = (0, 0)) -> dict[str, str]:
    return {
        f"{CPU}/cpu{core}/topology/physical_package_id": f"{package}\n",
        f"{CPU}/cpu{core}/cpufreq/scaling_cur_freq": f"{khz}\n",
        f"{CPU}/cpu{core}/cpufreq/scaling_min_freq": "800000\n",
        f"{CPU}/cpu{core}/cpufreq/scaling_max_freq": "4700000\n",
        f"{CPU}/cpu{core}/cpufreq/scaling_driver": "intel_pstate\n",
        f"{CPU}/cpu{core}/cpufreq/scaling_governor": "powersave\n",
        f"{CPU}/cpu{core}/cpufreq/energy_performance_preference": "balance_performance\n",
        f"{CPU}/cpu{core}/thermal_throttle/core_throttle_count": f"{throttles[0]}\n",
        f"{CPU}/cpu{core}/thermal_throttle/package_throttle_count": f"{throttles[1]}\n",
    }


def zone_files(zone: str, name: str, energy_uj: str, max_uj: str = "1000000") -> dict[str, str]:
    files = {"name": name, "energy_uj": energy_uj, "max_energy_range_uj": max_uj}
    return {f"{RAPL}/{zone}/{file}": f"{text}\n" for file, text in files.items()}


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cores 0, 1, 2 and 5 are ours; there is no nvidia-smi."""
    monkeypatch.setattr(clocks, "usable_cores", lambda: {0, 1, 2, 5})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def nvidia_smi(root: Path, script: str) -> None:
    path = write(root, {"bin/nvidia-smi": f"#!/bin/sh\n{script}\n"}) / "bin/nvidia-smi"
    path.chmod(0o755)


def test_this_machine_is_readable_as_json() -> None:
    found = read_clocks()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert sum(package["cores"] for package in found["cpu"]["packages"]) == len(clocks.usable_cores())
    size = cache_bytes()
    assert size is None or size >= 2**14
    used = energy_j(found, read_clocks())
    assert used is None or used >= 0.0


def test_nothing_readable_is_none(four_cores: Path) -> None:
    found = read_clocks(four_cores)
    (package,) = found["cpu"].pop("packages")
    assert package.pop("cores") == 4
    assert set(package.values()) == {None}
    assert set(found["cpu"].values()) == {None}
    assert (found["energy"], found["transparent_huge_pages"], found["gpu"]) == (None, None, None)
    assert energy_j(found, found) is None


def test_clocks_of_each_package_over_our_cores(four_cores: Path) -> None:
    files = {
        **core_files(0, 0, 3_000_000, throttles=(1, 4)),
        **core_files(1, 0, 4_000_000, throttles=(2, 4)),
        **core_files(2, 1, 1_000_000),
        **core_files(3, 1, 9_000_000),  # not ours
        **core_files(5, 1, 2_000_000),
    }
    files[f"{CPU}/cpu5/cpufreq/scaling_max_freq"] = "5000000\n"
    assert clocks._cpu(write(four_cores, files))["packages"] == [
        {
            "package": 0,
            "cores": 2,
            "current_mhz": 3500.0,
            "min_mhz": 800.0,
            "max_mhz": 4700.0,
            "core_throttles": 3,
            "package_throttles": 4,
        },
        {
            "package": 1,
            "cores": 2,
            "current_mhz": 1500.0,
            "min_mhz": 800.0,
            "max_mhz": 5000.0,
            "core_throttles": 0,
            "package_throttles": 0,
        },
    ]


def test_governor_and_preference(four_cores: Path) -> None:
    files = {**core_files(0, 0, 1), **core_files(1, 0, 1)}
    found = clocks._cpu(write(four_cores, files))
    assert (found["driver"], found["governor"]) == ("intel_pstate", "powersave")
    assert found["energy_preference"] == "balance_performance"
    write(four_cores, {f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n"})
    assert clocks._cpu(four_cores)["governor"] == "performance,powersave"


def test_cpuinfo_has_the_clock_where_sysfs_has_none(four_cores: Path) -> None:
    cpuinfo = "processor\t: 0\ncpu MHz\t\t: 2596.122\n\nprocessor\t: 1\ncpu MHz\t\t: 2600\n\nprocessor\t: 2\n"
    (package,) = clocks._packages(write(four_cores, {"proc/cpuinfo": cpuinfo}))
    assert package["current_mhz"] == pytest.approx((2596.122 + 2600) / 2)
    assert package["max_mhz"] is None


def test_psutil_has_the_clock_where_linux_files_have_none(
    monkeypatch: pytest.MonkeyPatch, four_cores: Path
) -> None:
    monkeypatch.setattr(clocks, "ROOT", four_cores)
    monkeypatch.setattr(
        clocks.psutil, "cpu_freq", lambda: SimpleNamespace(current=3200.0, min=0.0, max=4050.0)
    )
    (package,) = clocks._packages(four_cores)
    assert (package["current_mhz"], package["min_mhz"], package["max_mhz"]) == (3200.0, None, 4050.0)

    def broken() -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(clocks.psutil, "cpu_freq", broken)
    assert clocks._packages(four_cores)[0]["current_mhz"] is None


@pytest.mark.parametrize(
    ("files", "turbo"),
    [
        ({"intel_pstate/no_turbo": "0\n"}, True),
        ({"intel_pstate/no_turbo": "1\n"}, False),
        ({"cpufreq/boost": "1\n"}, True),
        ({"cpufreq/boost": "0\n"}, False),
        ({}, None),
    ],
    ids=["intel-on", "intel-off", "boost-on", "boost-off", "unknown"],
)
def test_turbo(tmp_path: Path, files: dict[str, str], turbo: bool | None) -> None:
    write(tmp_path, {f"{CPU}/{name}": text for name, text in files.items()})
    assert clocks._turbo(tmp_path) is turbo


@pytest.mark.parametrize(
    ("battery", "found"),
    [
        (None, {"on_mains": None, "battery_percent": None}),
        ((True, 81.26), {"on_mains": True, "battery_percent": 81.3}),
        ((False, 7), {"on_mains": False, "battery_percent": 7}),
        ((False, None), {"on_mains": None, "battery_percent": None}),
    ],
    ids=["no-battery", "mains", "battery", "odd-battery"],
)
def test_mains_or_battery(monkeypatch: pytest.MonkeyPatch, battery: Any, found: dict[str, Any]) -> None:
    reading = battery and SimpleNamespace(power_plugged=battery[0], percent=battery[1])
    monkeypatch.setattr(clocks.psutil, "sensors_battery", lambda: reading, raising=False)
    assert clocks._power_supply() == found


def test_a_system_without_battery_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(clocks.psutil, "sensors_battery", raising=False)
    assert clocks._power_supply() == {"on_mains": None, "battery_percent": None}


def test_energy_counts_each_package_once(four_cores: Path) -> None:
    before = {
        **zone_files("intel-rapl:0", "package-0", "100000"),
        **zone_files("intel-rapl:0:0", "core", "70000"),
        **zone_files("intel-rapl:1", "package-1", "900000"),
        **zone_files("intel-rapl:2", "psys", "5"),
        **zone_files("intel-rapl-mmio:0", "package-0", "100000"),
    }
    first = read_clocks(write(four_cores, before))
    assert [zone["zone"] for zone in first["energy"]] == [
        "intel-rapl:0",
        "intel-rapl:0:0",
        "intel-rapl:1",
        "intel-rapl:2",
    ]
    assert first["energy"][0] == {
        "zone": "intel-rapl:0",
        "name": "package-0",
        "energy_uj": 100000,
        "max_energy_uj": 1000000,
    }
    # The second package's counter wraps around: 100,000 up to the range, 50,000 from 0 on.
    write(four_cores, zone_files("intel-rapl:0", "package-0", "350000"))
    write(four_cores, zone_files("intel-rapl:1", "package-1", "50000"))
    assert energy_j(first, read_clocks(four_cores)) == pytest.approx(0.25 + 0.15)


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (zone_files("intel-rapl:0", "package-0", ""), "unreadable"),
        (zone_files("intel-rapl:0", "package-0", "5", max_uj=""), "wrapped around at an unknown range"),
        (zone_files("intel-rapl:1", "package-1", "5"), "another package appeared"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_energy_is_unknown_where_a_counter_is(four_cores: Path, later: dict[str, str], why: str) -> None:
    before = read_clocks(write(four_cores, zone_files("intel-rapl:0", "package-0", "100")))
    assert energy_j(before, before) == 0.0
    assert energy_j(before, read_clocks(write(four_cores, later))) is None, why


@pytest.mark.parametrize(
    ("text", "mode"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("odd\n", None)],
)
def test_transparent_huge_pages(tmp_path: Path, text: str, mode: str | None) -> None:
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert clocks._transparent_huge_pages(tmp_path) == mode


def cache_files(core: int, *caches: tuple[int, str, str]) -> dict[str, str]:
    return {
        f"{CPU}/cpu{core}/cache/index{index}/{file}": f"{text}\n"
        for index, (level, kind, size) in enumerate(caches)
        for file, text in (("level", str(level)), ("type", kind), ("size", size))
    }


@pytest.mark.parametrize(
    ("caches", "size"),
    [
        (
            ((1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1M"), (3, "Unified", "32768K")),
            2**25,
        ),
        (((1, "Data", "32K"), (1, "Instruction", "64K")), 2**15),
        (((2, "Unified", "512"), (3, "Unified", "")), 512),
        ((), None),
    ],
    ids=["three-levels", "data-only", "size-hidden", "none"],
)
def test_last_level_cache(
    four_cores: Path, caches: tuple[tuple[int, str, str], ...], size: int | None
) -> None:
    write(four_cores, cache_files(1, *caches))
    assert cache_bytes(four_cores) == size
    assert read_clocks(four_cores)["cpu"]["last_level_cache_bytes"] == size


def test_the_largest_cache_of_our_cores_counts(four_cores: Path) -> None:
    write(four_cores, cache_files(0, (3, "Unified", "32M")))
    write(four_cores, cache_files(2, (3, "Unified", "96M")))
    write(four_cores, cache_files(4, (3, "Unified", "256M")))  # not ours
    assert cache_bytes(four_cores) == 96 * 2**20


def test_a_gpu(four_cores: Path) -> None:
    nvidia_smi(four_cores, f"echo '{GPU_ROW}'")
    assert read_clocks(four_cores)["gpu"] == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "sm_mhz": 1980.0,
            "max_sm_mhz": 1980.0,
            "memory_mhz": 3201.0,
            "max_memory_mhz": 3201.0,
            "power_w": 431.25,
            "power_limit_w": 700.0,
            "temperature_c": 54.0,
            "persistence": True,
            "throttle_reasons": ["software_power_cap"],
        }
    ]


def test_what_a_gpu_does_not_say_is_none(four_cores: Path) -> None:
    row = "1, Small GPU, 300, [N/A], [Not Supported], N/A, [Unknown Error], , 40, [N/A], [N/A]"
    nvidia_smi(four_cores, f"echo '{GPU_ROW}'; echo '{row}'")
    found = clocks._gpus()
    assert found is not None
    known = {name: value for name, value in found[1].items() if value is not None}
    assert known == {"index": 1, "name": "Small GPU", "sm_mhz": 300.0, "temperature_c": 40.0}


def test_an_older_driver_knows_the_older_name(four_cores: Path) -> None:
    script = f'case "$1" in *clocks_event*) echo "not a valid field"; exit 2;; esac; echo "{GPU_ROW}"'
    nvidia_smi(four_cores, script)
    found = clocks._gpus()
    assert found is not None
    assert found[0]["throttle_reasons"] == ["software_power_cap"]


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", ""])
def test_no_gpu_is_none(four_cores: Path, script: str) -> None:
    nvidia_smi(four_cores, script)
    assert clocks._gpus() is None


def test_a_hanging_command_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "COMMAND_SECONDS", 0.1)
    assert clocks.command_output("sleep", "5") is None


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", ["idle"]),
        (
            "0x0000000000000068",
            ["hardware_slowdown", "software_thermal_slowdown", "hardware_thermal_slowdown"],
        ),
        ("0x0000000000000200", ["0x200"]),
        ("Not Active", None),
    ],
)
def test_throttle_reasons(mask: str, reasons: list[str] | None) -> None:
    assert clocks._throttle_reasons(mask) == reasons
