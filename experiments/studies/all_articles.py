"""All experiments of the articles in turn, each a run of its own, and one page with all of their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from experiments import environment, plugins
from experiments.articles import publish
from experiments.articles.page import page
from experiments.articles.study import (
    CEILINGS,
    DEFAULTS,
    SETTINGS,
    ArticleOptions,
    Published,
    command_of,
    refuse_unused,
)
from experiments.config import compose_run
from experiments.metrics import METRICS_VERSION
from experiments.models import LoadedModels
from experiments.plots.style import png
from experiments.record import git_tags
from experiments.studies.base import StudyOptions
from experiments.terminal import OUT
from experiments.tracking import Store, open_store, run

# As one reads the articles: theory, one request, then what changes the cost of a pass, then what follows.
ALL = (
    "theory",
    "read_vs_write",
    "request_anatomy",
    "prefill_curve",
    "batch_curve",
    "phases_and_batching",
    "latency_throughput",
    "pass_curve",
    "roofline",
    "cache_on_off",
    "context_curve",
    "batch_capacity",
    "chunked_prefill",
    "conversation",
    "workload_shapes",
    "quantized_decode",
)
TITLE = "Reading and writing, measured"


@dataclass
class AllArticlesOptions(StudyOptions):
    """`experiments`: which of them, in this order. `folder`: where the page and its figures are written too."""

    experiments: list[str] = field(default_factory=lambda: list(ALL))
    folder: str | None = None

    def __post_init__(self) -> None:
        if not self.experiments:
            raise ValueError("experiment.experiments=[]: expected at least one name")

    def prepare(self, overrides: Sequence[str]) -> Callable[[], bool]:
        started_s = time.perf_counter()
        refuse_unused(overrides, [*SETTINGS, CEILINGS], self.own_name)
        options = {name: plugins.default_options("experiment", name) for name in self.experiments}
        for name, chosen in options.items():
            if not hasattr(chosen, "run"):
                raise ValueError(
                    f"experiment.experiments=[{name}]: it has no page; expected {', '.join(ALL)}"
                )
        study = compose_run([*DEFAULTS, *overrides]).study
        # Checked before anything is measured, and the models loaded once.
        loaded = LoadedModels()
        jobs = {name: _job(chosen, study, overrides, loaded) for name, chosen in options.items()}

        def measure() -> bool:
            done, failures = _all(jobs, open_store())
            self._report(study, done, failures, overrides, started_s)
            return not failures

        return measure

    def _report(
        self,
        study: str,
        done: Mapping[str, Published],
        failures: Mapping[str, Exception],
        overrides: Sequence[str],
        started_s: float,
    ) -> None:
        minutes = (time.perf_counter() - started_s) / 60
        text = combined(done, failures, publish.PLOTS, command_of(self, overrides))
        tags = {
            "kind": "report",
            "experiment": self.own_name,
            "metrics_version": METRICS_VERSION,
            **git_tags(),
            **({"validity": "failed"} if failures else {}),
        }
        pictures = _pictures(done)
        with run(open_store(), study, "all articles", tags, {}) as logged:
            logged.log_text(text, "report.md")
            logged.set_description(text)
            for name, content in pictures.items():
                logged.log_bytes(content, f"{publish.PLOTS}/{name}")
        if self.folder is not None:
            _write(Path(self.folder), text, pictures)
            OUT.print(f"page and figures are in {self.folder}", markup=False)
        OUT.print(f"{minutes:.1f} min in all; logged as run {logged.run_id}")


Job = Callable[[Store], Published]


def _job(options: Any, study: str, overrides: Sequence[str], loaded: LoadedModels) -> Job:
    if not isinstance(options, ArticleOptions):
        return lambda store: options.run(
            study, [one for one in overrides if one.lstrip("+~").startswith("study=")], store
        )
    point = options.point(overrides, loaded)
    return lambda store: options.run(point, overrides, store)


def _all(jobs: Mapping[str, Job], store: Store) -> tuple[dict[str, Published], dict[str, Exception]]:
    """One that fails leaves a failed run and a line; the others go on."""
    done: dict[str, Published] = {}
    failures: dict[str, Exception] = {}
    for name, job in jobs.items():
        try:
            done[name] = job(store)
        except Exception as error:
            failures[name] = error
            OUT.print(f"{name} failed: {type(error).__name__}: {error}", markup=False)
    return done, failures


def combined(
    done: Mapping[str, Published], failures: Mapping[str, Exception], figure_folder: str, command: str
) -> str:
    """One page: what was found, line by line, then every experiment with its figures and tables."""
    lines = [
        f"* [{one.heading.title}](#{_anchor(one.heading.title)}): {one.found.headline}."
        for one in done.values()
    ]
    lines += [f"* {name} failed: {type(error).__name__}: {error}" for name, error in failures.items()]
    sections = [page(one.heading, one.found, figure_folder, level=2) for one in done.values()]
    again = f"{origin()}. All of it again, on your machine and model: `{command}`"
    return "\n\n".join([f"# {TITLE}", "\n".join(lines), again, *sections])


def origin() -> str:
    """When, with what, and on which machine."""
    commit = environment.git_state()["commit"]
    code = f"commit {commit[:7]}" if commit else f"metrics version {METRICS_VERSION}"
    return f"{date.today()}, {environment.cpu_name()}, torch {torch.__version__}, {code}"


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def _pictures(done: Mapping[str, Published]) -> dict[str, bytes]:
    return {name: png(figure) for one in done.values() for name, figure in one.found.drawn.items()}


def _write(folder: Path, text: str, pictures: Mapping[str, bytes]) -> None:
    (folder / publish.PLOTS).mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        (folder / publish.PLOTS / name).write_bytes(content)
    (folder / "README.md").write_text(text)
