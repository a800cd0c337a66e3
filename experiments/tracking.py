"""The experiment store: the only file of the project that imports MLflow.

It opens one store per checkout, logs a run with an honest status, and reads runs back. It knows nothing
about decoding, configuration files or metric names. The layout of the store is that of plain `mlflow ui`
started in the checkout: a SQLite file beside the project and artifacts under `mlruns/`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sqlite3
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from filelock import FileLock, Timeout

from experiments._flatten import flatten
from experiments._processes import (
    Terminated,
    host_id,
    is_out_of_memory,
    process_lives,
    process_tags,
    signals_raise,
    signals_wait,
)

__all__ = [
    "LoggedRun",
    "Store",
    "StoreError",
    "StoredRun",
    "Terminated",
    "artifact_root",
    "experiment_id",
    "find_runs",
    "flatten",
    "is_out_of_memory",
    "open_store",
    "project_root",
    "public_uri",
    "read_curve",
    "read_text",
    "run",
    "store_uri",
]

if TYPE_CHECKING:
    from mlflow import MlflowClient

Item = TypeVar("Item")

# MLflow reads these once, at its first import. Inherited by every child, the UI included.
MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",  # half a minute; MLflow's own 7 keep one waiting for minutes
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",  # refuse what is too long, never cut it
    "GIT_PYTHON_REFRESH": "quiet",
}
MAX_TAG_CHARS = 8000
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
LOCK_SECONDS = 120.0


class StoreError(RuntimeError):
    """The store or an experiment in it can't be used; the message is one line for the user."""


# --- where things are


def project_root() -> Path:
    """The checkout that holds this file, or the working directory when installed elsewhere."""
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def store_uri(root: Path) -> str:
    """The store's address: MLFLOW_TRACKING_URI where set, else the SQLite file in `root`, absolute."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _sqlite_uri(root.resolve() / "mlflow.db")


def _sqlite_uri(path: Path) -> str:
    # SQLAlchemy 2.1 decodes percent signs and takes what follows a '?' as options.
    return f"sqlite:///{str(path).replace('%', '%25').replace('?', '%3F')}"


def _sqlite_path(uri: str) -> Path | None:
    """The file behind a SQLite address, None for every other kind of store."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0])).absolute()


def artifact_root(root: Path, uri: str) -> Path:
    """The folder for artifacts of the store `uri`, where this process reaches it without a server."""
    database = _sqlite_path(uri)
    return (database.parent if database else root.resolve()) / "mlruns"


# --- opening the store


@dataclasses.dataclass(frozen=True)
class Store:
    """An open store. `client` is MLflow's, for the few who need more than this module offers."""

    root: Path
    uri: str
    client: MlflowClient


def open_store(root: Path | None = None) -> Store:
    """Open the store of `root` (default: the project's), creating or upgrading it, and repair dead runs.

    Safe for processes that start together. Runs that a killed process of this host left RUNNING become
    KILLED with `validity=interrupted`. Raises StoreError with one line when the store can't be used.
    """
    root = (root or project_root()).resolve()
    uri = store_uri(root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations that MLflow meets in its own dependencies
            return _open(root, uri)
    except StoreError:
        raise
    except Exception as error:
        reason = _first_line(error).replace(uri, public_uri(uri))
        raise StoreError(f"can't open the experiment store {public_uri(uri)}: {reason}") from error


def _open(root: Path, uri: str) -> Store:
    database = _sqlite_path(uri)
    if database:
        with _lock(database):
            _prepare_database(database, artifact_root(root, uri))
    store = Store(root, uri, _client(uri))
    _repair_dead_runs(store)
    return store


def public_uri(uri: str) -> str:
    """The address without user name and password."""
    scheme, separator, rest = uri.partition("://")
    authority, slash, path = rest.partition("/")
    return scheme + separator + authority.rpartition("@")[2] + slash + path


def _load_mlflow() -> None:
    """Import MLflow silently and without telemetry; about 1.5 seconds the first time."""
    for name, value in MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401


def _client(uri: str) -> MlflowClient:
    _load_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@contextmanager
def _lock(database: Path) -> Iterator[None]:
    database.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{database}.lock", timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise StoreError(f"another process has held {database}.lock for {LOCK_SECONDS:.0f} s") from error


def _prepare_database(database: Path, artifacts: Path) -> None:
    """Make the SQLite file, or bring an older one up to date after a copy. Call under the lock."""
    _load_mlflow()
    revision = _schema_revision(database)
    if revision is None:
        _create_database(database, artifacts)
    elif revision != _schema_tools()._get_latest_schema_revision():
        _upgrade_database(database, revision)


def _schema_tools() -> Any:
    # Private to MLflow and untyped; the public command `mlflow db upgrade` offers less and prints.
    from mlflow.store.db import utils

    return utils


def _schema_revision(database: Path) -> str | None:
    """The schema's revision, '' where tables exist without one, None for no file or an empty one."""
    if not database.exists() or database.stat().st_size == 0:
        return None
    with closing(sqlite3.connect(database)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "alembic_version" not in tables:
            return "" if tables else None
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return row[0] if row else ""


def _create_database(database: Path, artifacts: Path) -> None:
    # Built aside and renamed: a process killed half-way would leave tables that no later start can migrate.
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    fresh = database.with_name(f"{database.name}.new")
    fresh.unlink(missing_ok=True)
    make_store: Any = SqlAlchemyStore  # untyped in MLflow
    make_store(_sqlite_uri(fresh), artifacts.as_uri()).engine.dispose()
    os.replace(fresh, database)


def _upgrade_database(database: Path, revision: str) -> None:
    copy = database.with_name(f"{database.name}.{revision or 'unversioned'}.bak")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    engine = _schema_tools().create_sqlalchemy_engine(_sqlite_uri(database))
    try:
        _schema_tools()._initialize_tables(engine)
    except Exception as error:
        raise StoreError(
            f"{database} has schema {revision or 'none'}, which this MLflow can't upgrade "
            f"({_first_line(error)}); it is kept as {copy.name}"
        ) from error
    finally:
        engine.dispose()


# --- runs that a killed process left behind


def _repair_dead_runs(store: Store) -> None:
    mine = f"attributes.status = 'RUNNING' and tags.`process.host` = '{host_id()}'"
    experiments = [e.experiment_id for e in _pages(store.client.search_experiments)]
    for run_ in _pages(store.client.search_runs, experiments, mine) if experiments else ():
        if process_lives(run_.data.tags):
            continue
        # Read again: it may have ended between the search and the look at its process.
        if store.client.get_run(run_.info.run_id).info.status == "RUNNING":
            store.client.set_tag(run_.info.run_id, "validity", "interrupted")
            store.client.set_terminated(run_.info.run_id, "KILLED")


def _pages(search: Any, *arguments: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


# --- experiments


def experiment_id(store: Store, name: str) -> str:
    """The id of the experiment `name`, made where missing and restored where deleted.

    Safe for processes that ask together. Raises StoreError for a name that can't be used.
    """
    from mlflow.exceptions import MlflowException

    if not name.strip() or {"..", ".", ""} & set(name.split("/")):
        raise StoreError(f"{name!r} is no experiment name: it becomes a folder under mlruns")
    try:
        found = store.client.get_experiment_by_name(name)
        if found is None:
            found = _create_experiment(store, name)
        if found.lifecycle_stage == "deleted":
            store.client.restore_experiment(found.experiment_id)
    except MlflowException as error:
        raise StoreError(f"experiment {name!r} can't be used: {_first_line(error)}") from error
    return str(found.experiment_id)


def _create_experiment(store: Store, name: str) -> Any:
    from mlflow.exceptions import MlflowException

    # A server decides where its artifacts go; without one MLflow would follow the working directory.
    served = store.uri.startswith(("http://", "https://"))
    location = None if served else (artifact_root(store.root, store.uri) / quote(name, safe="/ ")).as_uri()
    try:
        return store.client.get_experiment(store.client.create_experiment(name, location))
    except MlflowException:
        winner = store.client.get_experiment_by_name(name)  # another process may have been faster
        if winner is None:
            raise
        return winner


# --- logging one run


class LoggedRun:
    """One open run. All methods write at once; call them after the timed region."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.run_id = run_id
        self._client = store.client

    def log_metrics(self, metrics: Mapping[str, float | None], step: int = 0) -> list[str]:
        """Log the finite values; return the names of those left out (None, infinite, not a number)."""
        kept = {n: float(v) for n, v in metrics.items() if v is not None and math.isfinite(v)}
        self._log_points([(name, value, step) for name, value in kept.items()])
        return [name for name in metrics if name not in kept]

    def log_curve(self, name: str, points: Iterable[tuple[int, float]]) -> list[int]:
        """Log (step, value) points of one metric; return the steps left out for a non-finite value."""
        points = list(points)
        self._log_points([(name, float(value), int(step)) for step, value in points if math.isfinite(value)])
        return [step for step, value in points if not math.isfinite(value)]

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log a nested configuration, flattened; a parameter can be logged once only."""
        from mlflow.entities import Param

        for batch in _batches(list(flatten(params).items()), PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=[Param(key, value) for key, value in batch])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or overwrite tags. A value above 8000 characters raises MLflow's error."""
        from mlflow.entities import RunTag

        for batch in _batches(list(tags.items()), PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in batch])

    def set_description(self, markdown: str) -> None:
        """Set the run's description; one too long for MLflow ends with a pointer to `description.md`."""
        if len(markdown) > MAX_TAG_CHARS:
            self.log_text(markdown, "description.md")
            pointer = "\n\n(goes on in the artifact description.md)"
            markdown = markdown[: MAX_TAG_CHARS - len(pointer)].rpartition("\n")[0] + pointer
        self.set_tags({"mlflow.note.content": markdown})

    def log_text(self, text: str, artifact_path: str) -> None:
        """Store `text` as the artifact `artifact_path`, for instance `config/resolved.yaml`."""
        self._client.log_text(self.run_id, text, artifact_path)

    def log_bytes(self, content: bytes, artifact_path: str) -> None:
        """Store `content` as the artifact `artifact_path`, for instance `plots/timeline.png`."""
        folder, _, name = artifact_path.rpartition("/")
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / name
            path.write_bytes(content)
            self.log_file(path, folder or None)

    def log_file(self, path: Path, artifact_dir: str | None = None) -> None:
        """Copy a file into the artifact folder `artifact_dir` (default: the run's own folder)."""
        self._client.log_artifact(self.run_id, str(path), artifact_dir)

    def _log_points(self, points: Sequence[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        for batch in _batches(points, METRICS_PER_BATCH):
            metrics = [Metric(name, value, now_ms, step) for name, value, step in batch]
            self._client.log_batch(self.run_id, metrics=metrics)


@contextmanager
def run(
    store: Store, experiment: str, run_name: str, tags: Mapping[str, str], params: Mapping[str, Any]
) -> Iterator[LoggedRun]:
    """Log one run of `experiment`; `params` is a configuration, nested or flat.

    The run ends FINISHED; after an exception FAILED with `validity` failed or oom, the tag `error` and the
    artifact `error.txt`; after Ctrl-C, SIGTERM or SIGHUP KILLED with `validity=interrupted`. Whatever was
    raised is raised on.
    """
    flat = flatten(params)
    with signals_raise():
        logged = _start(store, experiment, run_name, tags)
        try:
            logged.log_params(flat)
            yield logged
            with signals_wait():
                store.client.set_terminated(logged.run_id, "FINISHED")
        except BaseException as error:
            with signals_wait():
                _end_broken(store, logged, error)
            raise


def _start(store: Store, experiment: str, run_name: str, tags: Mapping[str, str]) -> LoggedRun:
    # One call makes the run with its process tags: a kill at any moment leaves a run that can be repaired.
    texts = {key: str(value) for key, value in tags.items()}
    source = {"mlflow.source.name": "twospeed", "mlflow.source.type": "LOCAL"}
    if texts.get("git_commit"):
        source["mlflow.source.git.commit"] = texts["git_commit"]
    created = store.client.create_run(
        experiment_id(store, experiment), run_name=run_name, tags={**texts, **source, **process_tags()}
    )
    return LoggedRun(store, created.info.run_id)


def _end_broken(store: Store, logged: LoggedRun, error: BaseException) -> None:
    killed = isinstance(error, (KeyboardInterrupt, Terminated))
    validity = "interrupted" if killed else "oom" if is_out_of_memory(error) else "failed"
    tags = {"validity": validity, "error": f"{type(error).__name__}: {_first_line(error)}"[:500]}
    try:
        logged.set_tags(tags)
        if not killed:
            logged.log_text("".join(traceback.format_exception(error)), "error.txt")
    except Exception as second:  # the first error is the one to show
        error.add_note(f"the failed run could not be described in the store: {_first_line(second)}")
    try:
        store.client.set_terminated(logged.run_id, "KILLED" if killed else "FAILED")
    except Exception as second:
        error.add_note(f"the run's status could not be stored: {_first_line(second)}")


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- reading runs back


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """One run as the store has it; each metric holds its value at the largest step."""

    run_id: str
    name: str
    status: str
    started_ms: int
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, float]


def find_runs(store: Store, experiment: str | None, filter_string: str = "") -> list[StoredRun]:
    """The runs of an experiment (None: of all), newest first; `filter_string` is MLflow's, as "tags.kind = 'point'"."""
    if experiment is None:
        ids = [e.experiment_id for e in _pages(store.client.search_experiments)]
    else:
        found = store.client.get_experiment_by_name(experiment)
        ids = [] if found is None else [found.experiment_id]
    return [_stored(r) for r in _pages(store.client.search_runs, ids, filter_string)] if ids else []


def read_curve(store: Store, run_id: str, name: str) -> list[tuple[int, float]]:
    """The (step, value) points of one metric, by step."""
    return sorted((p.step, p.value) for p in store.client.get_metric_history(run_id, name))


def read_text(store: Store, run_id: str, artifact_path: str) -> str:
    """A text artifact's content; raises MLflow's error where it is missing."""
    from mlflow.artifacts import load_text

    location = store.client.get_run(run_id).info.artifact_uri
    return load_text(f"{location}/{artifact_path}")


def _stored(found: Any) -> StoredRun:
    info, data = found.info, found.data
    return StoredRun(
        info.run_id,
        info.run_name,
        info.status,
        info.start_time,
        dict(data.tags),
        dict(data.params),
        dict(data.metrics),
    )
