"""From arguments to jobs and exit statuses; what a job does is a stand-in here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import command_line, plugins, run, tracking
from experiments.command_line import BadInputError, Sweep
from experiments.config import CONFIG_DIR, RunConfig
from experiments.tracking import StoreError

SPEED_SECTIONS = ("latency/", "throughput/", "speedup/", "spec/")


class Jobs:
    """A job that notes its configurations, and the report that is asked for at the end of a sweep."""

    def __init__(self, fail: Callable[[RunConfig], None] = lambda config: None) -> None:
        self.configs: list[RunConfig] = []
        self.reports: list[Sweep] = []
        self._fail = fail

    def __call__(self, config: RunConfig, sweep: Sweep) -> None:
        self.configs.append(config)
        sweep.studies.add(config.study)
        self._fail(config)

    def run(self, *arguments: str) -> int:
        return command_line.run_jobs(self, self.reports.append, arguments)


# --- one point


def test_one_point_is_one_job_and_no_sweep() -> None:
    jobs = Jobs()
    before = list(sys.argv)
    assert jobs.run("strategy=prompt_lookup", "drafter.max_ngram=2") == 0
    assert [(c.strategy, c.drafter.max_ngram) for c in jobs.configs] == [("prompt_lookup", 2)]
    assert jobs.reports == []
    assert sys.argv == before


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BadInputError("model.target=x: no such folder"), 2, "error: model.target=x: no such folder"),
        (StoreError("can't open the store"), 2, "error: can't open the store"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, status: int, line: str
) -> None:
    def fail(config: RunConfig) -> None:
        raise error

    assert Jobs(fail).run("strategy=baseline") == status
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"{line}\n")


def test_anything_else_is_a_traceback_and_another_status(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: RunConfig) -> None:
        raise RuntimeError("a fault\nof two lines")

    assert Jobs(fail).run("strategy=baseline") == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "in fail" in shown
    assert "RuntimeError: a fault" in shown


def test_a_value_error_of_a_job_is_a_fault_not_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: RunConfig) -> None:
        raise ValueError("math domain error")

    assert Jobs(fail).run("strategy=baseline") == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: RunConfig) -> None:
        raise KeyboardInterrupt

    assert Jobs(fail).run("strategy=baseline") == 130
    assert capsys.readouterr().err == "interrupted: a run that was under way is logged as KILLED\n"


@pytest.mark.parametrize("argument", ["strategy=x", "batchsize=1", "batch_size=four", "batch_size=0", "x"])
def test_bad_input_never_reaches_the_job(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    jobs = Jobs()
    assert jobs.run(argument) == 2
    shown = capsys.readouterr().err
    assert jobs.configs == []
    assert shown.count("\n") == 1
    assert shown.startswith("error: ")


def test_help_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    with pytest.raises(SystemExit) as caught:
        jobs.run("--help")
    assert caught.value.code in (0, None)
    shown = capsys.readouterr().out
    for group, folder in (("strategy", CONFIG_DIR / "strategy"), ("exactness", CONFIG_DIR / "exactness")):
        assert f"{group}: {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}\n" in shown
    # A test before this one may have added a drafter from outside.
    (drafters,) = (
        line.split(": ")[1].split(", ") for line in shown.splitlines() if line.startswith("drafter: ")
    )
    assert set(drafters) >= {"draft_model", "fallback", "layer_skip", "prompt_lookup", "suffix"}
    assert jobs.configs == []


# --- sweeps


def test_a_sweep_runs_every_point_and_reports_once() -> None:
    jobs = Jobs()
    assert jobs.run("-m", "strategy=baseline,prompt_lookup", "batch_size=1,2") == 0
    assert [(c.strategy, c.batch_size) for c in jobs.configs] == [
        ("baseline", 1),
        ("baseline", 2),
        ("prompt_lookup", 1),
        ("prompt_lookup", 2),
    ]
    (sweep,) = jobs.reports
    assert (sweep.num_points, sweep.failures, sweep.studies) == (4, [], {"inference"})
    assert sweep.sweep_id


@pytest.mark.parametrize(
    "arguments",
    [("seed=1,2", "-m", "strategy=baseline"), ("seed=1,2", "strategy=baseline", "--multirun")],
)
def test_the_flag_of_a_sweep_may_stand_anywhere(arguments: tuple[str, ...]) -> None:
    jobs = Jobs()
    assert jobs.run(*arguments) == 0
    assert [(config.strategy, config.seed) for config in jobs.configs] == [("baseline", 1), ("baseline", 2)]


def test_two_sweeps_have_two_ids() -> None:
    first, second = Jobs(), Jobs()
    first.run("-m", "strategy=baseline")
    second.run("-m", "strategy=baseline")
    assert first.reports[0].sweep_id != second.reports[0].sweep_id


def test_failing_points_are_named_and_the_rest_is_kept(capsys: pytest.CaptureFixture[str]) -> None:  # M14
    def fail(config: RunConfig) -> None:
        if config.seed == 1:
            raise RuntimeError("odd seed")
        if config.seed == 2:
            raise BadInputError("two is too many")

    jobs = Jobs(fail)
    assert jobs.run("-m", "strategy=baseline", "seed=0,1,2,3") == 1
    assert [config.seed for config in jobs.configs] == [0, 1, 2, 3]
    shown = capsys.readouterr().err
    assert shown.index("Traceback") < shown.index("error: two is too many")
    assert shown.splitlines()[-2:] == [
        "failed: point 2 (strategy=baseline): RuntimeError: odd seed",
        "failed: point 3 (strategy=baseline): two is too many",
    ]
    assert len(jobs.reports[0].failures) == 2


def test_a_point_that_does_not_check_out_does_not_stop_the_others() -> None:
    jobs = Jobs()
    assert jobs.run("-m", "strategy=baseline", "batch_size=1,0,2") == 1
    assert [config.batch_size for config in jobs.configs] == [1, 2]
    assert jobs.reports[0].failures == ["point 2 (strategy=baseline): batch_size=0: expected at least 1"]


def test_a_misspelt_point_is_found_before_any_point_runs(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    assert jobs.run("-m", "strategy=baseline,specdek") == 2
    assert jobs.configs == []
    assert capsys.readouterr().err.startswith("error: unknown strategy 'specdek'; known: ")


def test_an_interrupt_ends_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: RunConfig) -> None:
        raise KeyboardInterrupt

    jobs = Jobs(fail)
    assert jobs.run("-m", "strategy=baseline", "seed=0,1,2") == 130
    assert [config.seed for config in jobs.configs] == [0]


@pytest.mark.parametrize("flags", [(), ("-m",), ("--multirun",)])
def test_nothing_is_written_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = Jobs()
    assert jobs.run(*flags, "strategy=baseline") == 0
    assert len(jobs.configs) == 1
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


# --- for real: a plug-in from outside, and a sweep with failing points

ECHO = '''
"""Draft the newest token again and again."""

from dataclasses import dataclass

from specdec.drafters.base import Drafter, DrafterOptions
from specdec.types import DraftProposal

GROUP = "drafter"


class EchoDrafter(Drafter):
    def __init__(self, device):
        self.device = device

    def propose(self, rows, limits, go_on, draws):
        drafts = [row.token_ids[-1:] * min(limit, 2) for row, limit in zip(rows, limits)]
        return DraftProposal.certain(drafts, self.device)


@dataclass
class EchoOptions(DrafterOptions):
    def build(self, context):
        if context.num_slots == 2:
            raise RuntimeError("injected: no pairs")
        return EchoDrafter(context.device)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    root = tmp_path_factory.mktemp("command_line")
    save_model(root / "target")
    save_prompts(root / "prompts.jsonl", repeating_prompts((3, 4, 5)))
    (root / "echo.py").write_text(ECHO, encoding="utf-8")
    return root


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tracking.Store:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'store.db'}")
    monkeypatch.setattr(plugins, "_registry", {})
    return tracking.open_store(folder)


def echo_arguments(folder: Path) -> list[str]:
    return [
        f"plugin={folder / 'echo.py'}",
        "strategy=specdec",
        "drafter=echo",
        f"model.target={folder / 'target'}",
        "workload=jsonl",
        f"workload.path={folder / 'prompts.jsonl'}",
        "workload.max_new_tokens=12",
        "dtype=fp32",
        "threads=1",
        "measure.aa=false",
        "measure.ceilings=skip",
        "measure.memory=false",
    ]


def test_a_drafter_from_outside_runs_and_is_graded(
    folder: Path, store: tracking.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*echo_arguments(folder), "study=echo"]) == 0
    (found,) = tracking.find_runs(store, "echo")
    assert (found.status, found.tags["drafter"], found.tags["equivalence"]) == ("FINISHED", "echo", "exact")
    assert "spec/accept_pos_2" in found.metrics
    assert "spec/accept_pos_3" not in found.metrics
    assert found.params["plugin"] == str(folder / "echo.py")
    assert found.tags["lossless"] == "true"


def test_a_real_sweep_keeps_what_was_measured(
    folder: Path, store: tracking.Store, capsys: pytest.CaptureFixture[str]
) -> None:  # M14
    status = run.main(["-m", *echo_arguments(folder), "study=sweep", "batch_size=1,2,0,3"])
    assert status == 1
    shown = capsys.readouterr()
    assert "injected: no pairs" in shown.err
    assert "Traceback" in shown.err
    lines = shown.err.splitlines()
    assert lines[-2].startswith("failed: point 2 (strategy=specdec): RuntimeError: injected: no pairs")
    assert lines[-1].startswith("failed: point 3 (strategy=specdec): batch_size=0")

    found = tracking.find_runs(store, "sweep")
    points = [one for one in found if one.tags["kind"] == "point"]
    assert sorted((one.tags["batch_size"], one.status) for one in points) == [
        ("1", "FINISHED"),
        ("2", "FAILED"),
        ("3", "FINISHED"),
    ]
    (failed,) = (one for one in points if one.status == "FAILED")
    assert not [name for name in failed.metrics if name.startswith(SPEED_SECTIONS)]
    assert "in build" in tracking.read_text(store, failed.run_id, "error.txt")
    (report,) = (one for one in found if one.tags["kind"] == "report")
    assert {one.tags["sweep_id"] for one in found} == {report.tags["sweep_id"]}
    assert report.tags["validity"] == "failed"
    text = tracking.read_text(store, report.run_id, "report.md")
    assert text.strip() in shown.out
    assert text.count("| exact |") == 2
    assert "* failed: point 2" in text
    assert "* failed: point 3" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["temperature=0.8"], "did you mean 'sampling.temperature'?"),
        (["strategy=baseline,specdec"], "add -m to sweep"),
        (["workload=jsonl", "workload.path=a=b"], "quotes of its own"),
        (["threads=4096"], "expected at most"),
        (["study="], "study=''"),
        (["weights=int8", "weights.keep=lm_head"], "weights.keep: expected a list, as in [first,second]"),
    ],
)
def test_common_mistakes_are_told_the_way_out(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments import run

    assert run.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
