"""`python -m experiments.compare`, end to end, on tiny real models: what it logs, prints, and refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import compare, comparison, comparison_run, overview, plugins, tracking
from experiments.tracking import StoredRun
from quant.plan import plan_weights
from quant.weights import base as weights_base

CHECKOUT = Path(__file__).resolve().parents[1]
LENGTHS = (3, 6, 5, 4, 7, 3)
LOOKUP = "prompt_lookup draft_length.max=3"
NF4 = "baseline weights=bnb_nf4 weights.keep=[nothing]"  # there is no such layer
SPEED_SECTIONS = ("latency/", "throughput/", "speedup/", "spec/", "trace/")
TAGS = {"kind", "sweep_id", "validity", "metrics_version", "git_commit", "git_dirty"}
ARM_TAGS = TAGS | {
    "strategy",
    "variant",
    "model",
    "draft",
    "weights",
    "kv",
    "dtype",
    "device",
    "kernels",
    "workload",
    "batch_size",
    "lossless",
    "equivalence",
    "config_hash",
    "workload_hash",
}
CRASHING = '''
"""Drafts nothing, and breaks."""

from dataclasses import dataclass

from specdec.drafters.base import Drafter, DrafterOptions

GROUP = "drafter"


class CrashingDrafter(Drafter):
    def propose(self, rows, limits, go_on, draws):
        raise RuntimeError("injected while drafting")


@dataclass
class CrashingOptions(DrafterOptions):
    def build(self, context):
        return CrashingDrafter()
'''


@dataclass(frozen=True)
class Workplace:
    """Folders with a model and prompts, and a store for this module's runs; each test has a study of its own."""

    root: Path
    store: tracking.Store

    def arguments(self, *more: str) -> list[str]:
        """The cheapest real comparison, with what is given added or replaced."""
        base = {
            "model.target": f"{self.root / 'target'}",
            "workload": "jsonl",
            "workload.path": f"{self.root / 'prompts.jsonl'}",
            "workload.max_new_tokens": "12",
            "dtype": "fp32",
            "threads": "1",
            "measure.memory": "false",
            "measure.ceilings": "skip",
        }
        given = {argument.partition("=")[0] for argument in more}
        kept = [f"{key}={value}" for key, value in base.items() if key not in given]
        return [*more, *kept]

    def runs(self, study: str) -> tuple[StoredRun, dict[str, StoredRun]]:
        """The report, and the arms by name."""
        found = tracking.find_runs(self.store, study)
        (report,) = (run for run in found if run.tags["kind"] == "report")
        points = [run for run in found if run.tags["kind"] == "point"]
        assert {run.tags["sweep_id"] for run in points} <= {report.tags["sweep_id"]}
        return report, {run.name: run for run in points}

    def artifact(self, found: StoredRun, path: str) -> str:
        return tracking.read_text(self.store, found.run_id, path)

    def files(self, found: StoredRun) -> set[str]:
        folder = next(self.root.glob(f"mlruns/*/{found.run_id}/artifacts"))
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("compare")
    save_model(root / "target")
    save_prompts(root / "prompts.jsonl", repeating_prompts(LENGTHS))
    (root / "crashing.py").write_text(CRASHING, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        yield Workplace(root, tracking.open_store(root))


def candidates(*arms: str) -> str:
    return f"candidates={json.dumps(list(arms))}"


# --- what a comparison leaves behind


def test_a_comparison_is_printed_and_logged(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = place.arguments(
        candidates(LOOKUP, "specdec drafter.weights=plain"), "study=whole", "measure.repeats=2"
    )
    assert compare.main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    report, arms = place.runs("whole")
    assert report.run_id in shown.out
    for label in (LOOKUP, "specdec drafter.weights=plain"):
        (line,) = (
            line for line in shown.out.splitlines() if line.startswith(f"{label}: ") and "total" in line
        )
        assert line.endswith("12 of 12 texts as the baseline's; exact against its twin")
    assert "noise: baseline against itself" in shown.out
    assert "memory     baseline again" not in shown.out

    assert (report.status, set(report.tags) >= TAGS) == ("FINISHED", True)
    assert place.files(report) >= {
        "report.md",
        "plots/intervals.png",
        "plots/timeline.png",
        "trace/events.jsonl",
        "outputs/tokens.jsonl",
        "config/arms.yaml",
        "env/environment.json",
    }
    text = place.artifact(report, "report.md")
    assert f"| arm | baseline | {LOOKUP} | specdec drafter.weights=plain |" in text
    assert text.startswith(report.tags["mlflow.note.content"].rstrip())
    assert f"| {' | '.join(overview.HEADING)} |" in text
    assert {"noise/again_vs_itself", "compare/prompt_lookup_draft_length.max_3.decode"} <= set(report.metrics)
    settings = yaml.safe_load(place.artifact(report, "config/arms.yaml"))
    assert settings[LOOKUP]["draft_length"]["max"] == 3

    assert list(reversed(arms)) == ["baseline", LOOKUP, "specdec drafter.weights=plain"]
    for label, run in arms.items():
        assert (run.status, set(run.tags) >= ARM_TAGS) == ("FINISHED", True)
        assert run.tags["equivalence"] == ("n/a" if label == "baseline" else "exact")
        assert ("verdict" in run.tags) == (label != "baseline")
        assert run.tags["validity"] == report.tags["validity"]
        assert report.run_id in run.tags["mlflow.note.content"]
        assert "latency/tpot_ms.p50" in run.metrics
        assert ("speedup/decode_vs_baseline.ci_low" in run.metrics) == (label != "baseline")
        resolved = yaml.safe_load(place.artifact(run, "config/resolved.yaml"))
        assert resolved == settings[label]
    assert len({run.tags["config_hash"] for run in arms.values()}) == 3
    assert len({run.tags["variant"] for run in arms.values()}) == 3


def test_events_and_texts_name_their_arm(place: Workplace) -> None:
    assert compare.main(place.arguments(candidates(LOOKUP), "study=events", "workload.limit=1")) == 0
    report, _ = place.runs("events")
    for path in ("trace/events.jsonl", "outputs/tokens.jsonl"):
        rows = [json.loads(line) for line in place.artifact(report, path).splitlines()]
        assert {row["arm"] for row in rows} == {"baseline", LOOKUP, "baseline again"}


def test_memory_and_ceilings_are_measured_unless_told_otherwise(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["study=all", "measure.memory=true", "measure.ceilings=auto", "workload.limit=1"]
    # The same arm again: one process more for both.
    assert compare.main(place.arguments(candidates("baseline"), *settings)) == 0
    assert "a target pass:" in capsys.readouterr().out
    report, arms = place.runs("all")
    assert "plots/roofline.png" in place.files(report)
    for run in arms.values():
        assert {"memory/peak_mib", "roofline/mbu_target_pct"} <= set(run.metrics)
        assert run.tags["ceilings"] == report.tags["ceilings"]
    assert arms["baseline"].metrics["memory/peak_mib"] == arms["baseline (2)"].metrics["memory/peak_mib"]
    (row,) = (line for line in place.artifact(report, "report.md").splitlines() if "peak memory" in line)
    assert "-" not in row


def test_kernels_are_chosen_once_and_named_in_every_arm(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def noting(model: Any, weights: Any, *setting: Any) -> Any:
        if next(model.parameters()).is_meta:  # a conversion follows a plan of the real one
            planned.append(weights)
        return plan_weights(model, weights, *setting)

    monkeypatch.setattr(weights_base, "plan_weights", noting)
    int8, self_int8 = "baseline weights=int8", "self_int8 weights=int8"
    assert compare.main(place.arguments(candidates(int8, self_int8, NF4), "study=kernels")) == 1
    report, arms = place.runs("kernels")
    kernel = arms[int8].params["weights.kernel"]
    assert kernel in ("torch_int8pack", "onednn_u8s8")
    assert arms[self_int8].params["weights.kernel"] == kernel
    assert arms[self_int8].params["drafter.weights"] == f"int8 kernel={kernel}"
    settings = yaml.safe_load(place.artifact(report, "config/arms.yaml"))
    for label in (int8, self_int8):
        assert yaml.safe_load(place.artifact(arms[label], "config/resolved.yaml")) == settings[label]
        assert settings[label]["weights"]["kernel"] == kernel
        assert arms[label].tags["equivalence"] in ("n/a", "exact")
    assert arms[NF4].status == "FAILED"
    assert [weights.name for weights in planned if weights.name != "bnb_nf4"] == ["int8"]


# --- failures


def test_a_failing_candidate_keeps_the_others(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_registry", {})
    broken = f"specdec plugin={place.root / 'crashing.py'} drafter=crashing"
    assert compare.main(place.arguments(candidates(NF4, broken, LOOKUP), "study=failing")) == 1
    shown = capsys.readouterr().out
    assert f"{NF4}: failed, no figures (weights=bnb_nf4: " in shown
    assert f"{broken}: failed, no figures (RuntimeError: injected while drafting)" in shown
    report, arms = place.runs("failing")
    assert (report.status, report.tags["validity"]) == ("FINISHED", "failed")
    for label in (NF4, broken):
        run = arms[label]
        assert (run.status, run.tags["validity"]) == ("FAILED", "failed")
        assert not [name for name in run.metrics if name.startswith(SPEED_SECTIONS)]
        assert f"{label}: failed, no figures" in place.artifact(report, "report.md")
        assert f"{label}: failed" in run.tags["mlflow.note.content"]
    assert "in propose" in place.artifact(arms[broken], "error.txt")
    assert "config/crashing.py" in place.files(arms[broken])
    assert (arms[LOOKUP].status, arms[LOOKUP].tags["equivalence"]) == ("FINISHED", "exact")
    assert "speedup/decode_vs_baseline" in arms[LOOKUP].metrics


def test_a_baseline_that_does_not_fit_is_one_line_and_a_failed_report(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = place.arguments(f'baseline="{NF4}"', candidates("baseline"), "study=unfit")
    assert compare.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: weights=bnb_nf4: ")
    report, arms = place.runs("unfit")
    assert (report.status, arms) == ("FAILED", {})


def test_a_result_is_shown_before_the_store_can_fail(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("injected: no space left")

    monkeypatch.setattr(comparison_run, "_record", failing)
    with pytest.raises(RuntimeError, match="no space left"):
        compare.main(place.arguments(candidates(LOOKUP), "study=full", "workload.limit=1"))
    assert f"{LOOKUP}: no verdict from fewer than 6 pairs" in capsys.readouterr().out
    assert place.runs("full")[0].status == "FAILED"


# --- bad input: one line, exit status 2, nothing logged

BAD_INPUT: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no candidates": ([], ("no candidates", "'candidates=[")),
    "an empty list": (["candidates=[]"], ("candidates=[]", "a list of arms")),
    "a list without end": (["candidates=[specdec"], ("candidates=[specdec", "a list of arms")),
    "words without quotes": (
        ["candidates=[specdec seed=1]"],
        ("candidates=[specdec seed=1]", '["prompt_lookup'),
    ),
    "a sweep": (["candidates=specdec,baseline"], ("candidates=specdec,baseline", "a list of arms")),
    "numbers": (["candidates=[1, 2]"], ("candidates=[1, 2]", "a list of arms")),
    "a dictionary": (["candidates={specdec: 1}"], ("candidates={specdec: 1}", "a list of arms")),
    "two lists": (["candidates=[specdec]", "candidates=[baseline]"], ("candidates", "twice")),
    "a list as baseline": (["baseline=[specdec]", "candidates=[baseline]"], ("baseline=[specdec]", "an arm")),
    "unknown strategy": (["candidates=[specdek]"], ("'specdek'", "baseline", "specdec", "prompt_lookup")),
    "unknown baseline": (["baseline=bas", "candidates=[specdec]"], ("'bas'", "baseline", "prompt_lookup")),
    "unknown key in an arm": (
        [candidates("prompt_lookup draft_lenght.max=3")],
        ("arm 'prompt_lookup draft_lenght.max=3'", "did you mean 'draft_length'?"),
    ),
    "unknown key": (["candidates=[specdec]", "batchsize=2"], ("batchsize", "batch_size")),
    "value out of range in an arm": (
        [candidates("prompt_lookup", "prompt_lookup draft_length.max=0")],
        ("arm 'prompt_lookup draft_length.max=0': draft_length.max=0",),
    ),
    "a KV store that can't hold an arm's pass": (
        [candidates("prompt_lookup", "prompt_lookup kv=kv_int4 kv.tail=2 draft_length.max=2")],
        ("arm 'prompt_lookup kv=kv_int4 kv.tail=2 draft_length.max=2': kv.tail=2: ", "at least 3"),
    ),
    "shared setting in an arm": ([candidates("specdec seed=1")], ("arm 'specdec seed=1' sets seed",)),
    "an arm of settings": ([candidates("seed=1 specdec")], ("arm 'seed=1 specdec'", "preset")),
    "an arm that does not end": ([candidates("specdec 'x")], ('arm "specdec \'x"', "preset")),
    "no list but -m": (["-m", "candidates=[specdec]"], ("-m", "candidates=")),
    "unknown option": (["--cfg", "job", "candidates=[specdec]"], ("--cfg", "candidates=")),
    "a strategy for all": (["strategy=specdec", "candidates=[baseline]"], ("strategy", "baseline=")),
    "missing file": (
        ["candidates=[prompt_lookup]", "workload.path=/nowhere.jsonl"],
        ("workload.path", "/nowhere.jsonl"),
    ),
    "too many threads": (["candidates=[prompt_lookup]", "threads=4096"], ("threads=4096",)),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(place: Workplace, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, mentions = BAD_INPUT[case]
    assert compare.main(place.arguments(*arguments, "study=bad")) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    for mention in mentions:
        assert mention in line
    assert shown.out == ""
    assert tracking.find_runs(place.store, "bad") == []


def test_a_fault_of_ours_is_no_bad_input(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(comparison, "prepare", failing)
    with pytest.raises(comparison.ArmError) as caught:
        compare.main(place.arguments(f'baseline="{NF4}"', candidates("specdec")))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_usage_and_an_example(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert compare.main([flag]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m experiments.compare")
    assert "example: " in shown


def test_the_example_of_the_help_can_be_read() -> None:
    example = compare.USAGE.partition("example: ")[2].strip()
    question = compare.Question.parse(shlex.split(example)[3:])
    assert question == compare.Question("baseline", ("prompt_lookup draft_length.max=6", "specdec"), ())


# --- in a process of its own


def test_an_interrupt_leaves_a_killed_report_and_a_line(place: Workplace) -> None:
    arguments = place.arguments(candidates(LOOKUP), "study=killed", "measure.repeats=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.compare", *arguments],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("memory"):  # loaded: the run is open and being measured
                break
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert shown.splitlines()[-1].startswith("interrupted: ")
    report, arms = place.runs("killed")
    assert (report.status, report.tags["validity"], arms) == ("KILLED", "interrupted", {})
