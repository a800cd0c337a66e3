"""How often a comparison of an arm with itself gives a verdict, and how often a true slowdown is seen.

    python -m experiments.benchmarks.false_alarms record      # times of plain decoding here, beside itself (6 minutes)
    python -m experiments.benchmarks.false_alarms simulate    # comparisons of recorded times (seconds)
    python -m experiments.benchmarks.false_alarms repeat      # real comparisons, one process each (20 x 25 s)

A simulated comparison takes for each prompt one recorded repeat, in which the same decoding ran twice in turn, and
tosses a coin which of the two is the candidate. So the noise, and how much of it two neighbours share, is this
machine's; the verdict comes from the code that real comparisons use.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from experiments.comparison import measure_comparison, prepare_comparison
from experiments.environment import collect
from experiments.statistics import (
    FASTER,
    SLOWER,
    Ratio,
    Unit,
    by_unit,
    decode_speedup,
)
from experiments.trace import RequestTimeline

RECORDING = Path(__file__).with_name("recorded_steps.json.gz")
NUM_COMPARISONS = 2000
# What the README's first comparison measures.
PROMPTS = 12
VERDICT = re.compile(
    r"^baseline[^:]*: (decodes faster|decodes slower|no difference shown|no verdict)", re.MULTILINE
)


@dataclass(frozen=True)
class Recording:
    """Step gaps in ms by (prompt, repeat), of two arms that are the same."""

    machine: str
    pairs: dict[Unit, tuple[tuple[float, ...], tuple[float, ...]]]

    @property
    def repeats_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for prompt, repeat in sorted(self.pairs):
            found.setdefault(prompt, []).append(repeat)
        return found


def record(path: Path, repeats: int, overrides: Sequence[str]) -> None:
    """Measure plain decoding beside itself and keep the times between its commits."""
    settings = [
        f"measure.repeats={repeats}",
        "measure.aa=false",
        "measure.memory=false",
        "measure.ceilings=skip",
    ]
    comparison = prepare_comparison("baseline", ["baseline"], [*settings, *overrides])
    measured = measure_comparison(comparison).measured
    ours, theirs = (measured.timelines_of(label) for label in comparison.points)
    config, cpu = comparison.shared.config, collect()["cpu"]["model"]
    machine = f"{cpu}, {config.threads} threads, {config.dtype}, {config.model.target}"
    rows = [[*unit, _gaps_ms(ours[unit]), _gaps_ms(theirs[unit])] for unit in sorted(ours)]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"machine": machine, "validity": measured.validity, "pairs": rows}, file)
    print(f"{len(rows)} pairs on {machine}, {measured.validity}; kept in {path}")


def load(path: Path = RECORDING) -> Recording:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)
    pairs = {
        (prompt, repeat): (tuple(ours), tuple(theirs)) for prompt, repeat, ours, theirs in found["pairs"]
    }
    return Recording(found["machine"], pairs)


def simulate(
    recording: Recording, num_comparisons: int, slowdown_frac: float = 0.0, repeats: int = 1, seed: int = 0
) -> Counter[str]:
    """Verdicts of comparisons with `repeats` repeats, the candidate being slower by `slowdown_frac`."""
    random = np.random.default_rng(seed)
    return Counter(
        _simulated_ratio(recording, random, slowdown_frac, repeats).verdict for _ in range(num_comparisons)
    )


def _simulated_ratio(
    recording: Recording, random: np.random.Generator, slowdown_frac: float, repeats: int
) -> Ratio:
    baseline, candidate = [], []
    for prompt, known in recording.repeats_of.items():
        for number, repeat in enumerate(random.choice(known, repeats, replace=False)):
            pair = recording.pairs[prompt, int(repeat)]
            first = int(random.integers(2))
            baseline.append(_timeline(prompt, number, pair[first], 1.0))
            candidate.append(_timeline(prompt, number, pair[1 - first], 1 + slowdown_frac))
    ratio = decode_speedup(by_unit(candidate), by_unit(baseline))
    assert ratio is not None
    return ratio


def _timeline(prompt: int, repeat: int, gaps_ms: Sequence[float], scale: float) -> RequestTimeline:
    times_s = (0.0, *(scale * np.cumsum(gaps_ms) / 1e3).tolist())
    count = len(times_s)
    return RequestTimeline(prompt, repeat, 0.0, -1.0, times_s, (1,) * count, tuple(range(count)))


def _gaps_ms(timeline: RequestTimeline) -> list[float]:
    times = timeline.commit_times_s
    return [round(1e3 * (later - earlier), 3) for earlier, later in pairwise(times)]


def alarms_frac(verdicts: Counter[str]) -> float:
    """Share of comparisons that were called faster or slower."""
    return (verdicts[FASTER] + verdicts[SLOWER]) / verdicts.total()


def _print_simulations(recording: Recording) -> None:
    print(
        f"recorded: {len(recording.pairs)} pairs of {len(recording.repeats_of)} prompts on {recording.machine}"
    )
    for repeats in (1, 2, 3):
        for slowdown_frac in (0.0, 0.02, 0.05):
            verdicts = simulate(recording, NUM_COMPARISONS, slowdown_frac, repeats)
            what = "false alarms" if not slowdown_frac else "called slower"
            share = alarms_frac(verdicts) if not slowdown_frac else verdicts[SLOWER] / verdicts.total()
            print(
                f"measure.repeats={repeats}, slower by {100 * slowdown_frac:.0f} %: "
                f"{100 * share:.1f} % {what} of {NUM_COMPARISONS}"
            )


def repeat_here(times: int, candidate: str, busy: bool, overrides: Sequence[str]) -> Counter[str]:
    """Run the command so many times and count its verdicts."""
    verdicts: Counter[str] = Counter()
    quick = ["measure.memory=false", *overrides]
    command = [sys.executable, "-m", "experiments.compare", f"candidates=['{candidate}']", *quick]
    with _busy_process() if busy else _nothing():
        for _ in track(range(times), transient=True):
            started_s = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken_s = time.perf_counter() - started_s
            found = VERDICT.search(done.stdout)
            verdicts[found.group(1) if found else "none"] += 1
            noise = re.search(r"^noise: .*$", done.stdout, re.MULTILINE)
            shown = done.stdout[found.start() :].split(";")[0] if found else "no verdict"
            print(f"{taken_s:.0f} s: {shown} | {noise.group() if noise else 'no A/A arm'}", flush=True)
    return verdicts


@contextmanager
def _busy_process() -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _spin() -> None:
    while True:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "simulate", "repeat"))
    parser.add_argument("--recording", type=Path, default=RECORDING)
    parser.add_argument("--repeats", type=int, default=10, help="record: repeats of the workload")
    parser.add_argument("--times", type=int, default=20, help="repeat: comparisons")
    parser.add_argument("--candidate", default="baseline", help="repeat: the arm beside baseline")
    parser.add_argument("--busy", action="store_true", help="repeat: with a process beside that never rests")
    parser.add_argument("settings", nargs="*", help="settings of all arms, such as threads=1")
    options = parser.parse_intermixed_args(arguments)
    if options.what == "record":
        record(options.recording, options.repeats, [f"workload.limit={PROMPTS}", *options.settings])
    elif options.what == "simulate":
        _print_simulations(load(options.recording))
    else:
        verdicts: Any = repeat_here(options.times, options.candidate, options.busy, options.settings)
        print(", ".join(f"{verdict}: {count}" for verdict, count in sorted(verdicts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
