"""An experiment of the articles: prepared, measured in a laboratory, printed, logged as one MLflow run."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from experiments import environment, plugins, record
from experiments.articles import publish
from experiments.articles.findings import Findings
from experiments.articles.lab import CACHED, Lab
from experiments.articles.page import Heading, page
from experiments.ceilings_store import StoredCeilings
from experiments.config import compose_run
from experiments.load import LoadMeter
from experiments.measure import old_objects_exempt
from experiments.models import LoadedModels
from experiments.point import PreparedPoint, prepare
from experiments.report import threads, variant
from experiments.studies.base import StudyOptions
from experiments.terminal import OUT
from experiments.tracking import Store, open_store, run
from specdec.hf_adapter import cache_shape

DEFAULTS = ("strategy=baseline", "study=articles", "measure.aa=false", "fidelity.corpus=none")
# What every experiment of this kind depends on; each may add to it.
SETTINGS = ("strategy", "weights", "kv", "model", "dtype", "device", "threads", "seed", "study", "plugin")
DECODING = ("decoding", "drafter", "verifier", "draft_length", "sampling", "workload", "prefill_chunk")
CEILINGS = "measure.ceilings"
ENDS = tuple(f"sampling.{key}" for key in ("stop", "stop_token_ids", "ignore_eos", "min_new_tokens"))
# How much is written is an option of each experiment: no text is refused for what would come behind it.
NEW_TOKENS = "workload.max_new_tokens"
# In place of texts that nobody reads: these fit into any model's context.
NO_TEXTS = ("workload=random", "workload.limit=1", "workload.prompt_tokens=1")


@dataclass(frozen=True)
class Published:
    """Findings under their heading, and the run that has them."""

    heading: Heading
    found: Findings
    run_id: str


@dataclass
class ArticleOptions(StudyOptions):
    """Options of an experiment of the articles: plain typed fields with defaults, checked in `__post_init__`.

    A subclass says what it measures in `title`, and whether a strategy's drafter takes part (`decodes`) or only passes
    of its target are timed, which is refused for strategies with a drafter. `uses` are settings that it depends on
    besides those that all do, `stores` is the option that lists KV stores, and `ends` says whether its texts end as the
    sampling says; those of others go on to their length, so settings of ends are refused.
    """

    title: ClassVar[str]
    decodes: ClassVar[bool] = False
    ends: ClassVar[bool] = False
    uses: ClassVar[Sequence[str]] = ()
    stores: ClassVar[str] = ""

    @abstractmethod
    def measure(self, lab: Lab) -> Findings:
        """Measure; nothing is logged or printed meanwhile."""

    def check_at_least(self, **least: float) -> None:
        """Raise ValueError, in one line, for an option below its least value; of a list, for one of its values."""
        for name, bound in least.items():
            value = getattr(self, name)
            values = value if isinstance(value, list) else [value]
            if not values or min(values) < bound:
                what = "numbers of at least" if isinstance(value, list) else "at least"
                raise ValueError(f"experiment.{name}={value}: expected {what} {bound}")

    @property
    def _store_names(self) -> Sequence[str]:
        return getattr(self, self.stores) if self.stores else ()

    def _check_stores(self, point: PreparedPoint) -> None:
        """Raise ValueError, in one line, for a KV store that can't hold the model's heads."""
        pool = point.pool
        shape = cache_shape(pool.target_config, 1, 1, pool.dtype, pool.device)
        for name in self._store_names:
            store = plugins.default_options("kv", name)
            try:
                if hasattr(store, "check"):
                    store.check(shape)
            except ValueError as error:
                raise ValueError(f"experiment.{self.stores}=[{name}]: {error}") from error

    def prepare(self, overrides: Sequence[str]) -> Callable[[], bool]:
        point = self.point(overrides)

        def measure() -> bool:
            self.run(point, overrides, open_store())
            return True

        return measure

    def point(self, overrides: Sequence[str], loaded: LoadedModels | None = None) -> PreparedPoint:
        """The setting that the command line names. Raises ValueError for one that would be ignored."""
        used = [*SETTINGS, *(DECODING if self.decodes else ()), *self.uses, CEILINGS]
        refuse_unused(overrides, used, self.own_name)
        if not self.ends:
            refuse_ends(overrides, self.own_name)
        for name in self._store_names:
            plugins.default_options("kv", name)  # refuses an unknown one
        texts = () if "workload" in used else NO_TEXTS
        config = compose_run([*DEFAULTS, *texts, f"{NEW_TOKENS}=1", *overrides])
        if config.drafter is not None and not self.decodes:
            raise ValueError(
                f"strategy={config.strategy}: experiment={self.own_name} times passes of the target, in which "
                f"drafter={config.drafter.name} takes no part; expected a strategy without a drafter, "
                "or weights=... and kv=..."
            )
        if config.decoding.name != CACHED and not self.decodes:
            raise ValueError(
                f"decoding={config.decoding.name}: experiment={self.own_name} times passes over a cache, whatever the "
                f"decoding; expected {CACHED}"
            )
        if config.measure.ceilings == "skip":
            raise ValueError(
                f"{CEILINGS}=skip: experiment={self.own_name} needs them; expected auto or refresh"
            )
        point = prepare(config, loaded)
        self._check_stores(point)
        torch.set_num_threads(point.config.threads or 1)  # for what is timed, the choice of kernels included
        return point.with_kernels()

    def run(self, point: PreparedPoint, overrides: Sequence[str], store: Store) -> Published:
        """Measure, print, and log one run. Raises whatever kept it from being measured or logged."""
        started_s = time.perf_counter()
        config = point.config
        ceilings = StoredCeilings(store, config.study, config.measure.ceilings == "refresh")
        hardware = point.hardware(ceilings)
        assert hardware is not None  # `point` refuses to leave them out
        OUT.print(f"{self.own_name}: {self.title}", markup=False)
        tags = {**record.tags_before(point, None), "experiment": self.own_name}
        params = {**vars(config), "experiment": asdict(self)}
        name = f"{self.own_name} {config.strategy}"
        with run(store, config.study, name, tags, params) as logged:
            machine = environment.collect()
            record.record_setting(point, machine, logged)
            load = LoadMeter()
            with old_objects_exempt():
                found = self.measure(Lab(point, hardware))
            foreign = load.read()
            setting = setting_line(point, machine_name(machine, config.device))
            heading = Heading(self.own_name, self.title, setting, command_of(self, overrides))
            # Printed before it is logged: a store that fails now must not take the result with it.
            publish.show(found)
            record.record_environment({**machine, "load": foreign.as_dict()}, logged)
            logged.set_tags(
                {
                    "validity": "noisy" if foreign.is_noisy else "ok",
                    "foreign_cores": f"{foreign.cores:.2f}",
                    **({"ceilings": ceilings.run_id} if ceilings.run_id else {}),
                }
            )
            publish.log(found, page(heading, found, publish.PLOTS), logged)
        if foreign.is_noisy:
            OUT.print(f"noisy: other processes kept {foreign.cores:.1f} cores busy meanwhile; trust no time")
        OUT.print(f"{time.perf_counter() - started_s:.0f} s; logged as run {logged.run_id}")
        return Published(heading, found, logged.run_id)


def refuse_unused(overrides: Sequence[str], used: Sequence[str], name: str) -> None:
    """Raise ValueError, in one line, for a setting that the experiment `name` would ignore."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key == NEW_TOKENS:
            raise ValueError(
                f"{override}: how much experiment={name} writes is its own option; expected experiment.*"
            )
        if key not in used and key.partition(".")[0] not in used:
            raise ValueError(
                f"{override}: experiment={name} doesn't depend on it; expected {', '.join(used)}"
            )


def refuse_ends(overrides: Sequence[str], name: str) -> None:
    """Raise ValueError, in one line, for a setting of where texts end."""
    for override in overrides:
        if override.lstrip("+~").partition("=")[0] in ENDS:
            raise ValueError(
                f"{override}: texts of experiment={name} go on to their length; expected none of {', '.join(ENDS)}"
            )


def command_of(options: Any, overrides: Sequence[str]) -> str:
    """The command line that says the same; options that have their defaults are left out."""
    defaults = asdict(type(options)())
    own = [
        f"experiment.{name}={str(value).replace(' ', '')}"
        for name, value in asdict(options).items()
        if value != defaults[name]
    ]
    parts = [f"+experiment={options.own_name}", *own, *overrides]
    return " ".join(
        ["python -m experiments.run", *(f"'{part}'" if _quotes(part) else part for part in parts)]
    )


def _quotes(part: str) -> bool:
    return any(character in part for character in ' []{}()*?$&;|<>"')


def setting_line(point: PreparedPoint, machine: str) -> str:
    """What was measured, and on what."""
    config = point.config
    parts = [
        config.model.target,
        variant(point.arms.strategy),
        config.device,
        config.dtype,
        threads(config.threads),
    ]
    return f"{', '.join(parts)}; {machine}"


def machine_name(machine: Mapping[str, Any], device: str) -> str:
    """The processor, or the GPU that computed, as a page names it."""
    return str(machine["gpu"]["devices"][0]["name"]) if device == "cuda" else environment.cpu_name()
