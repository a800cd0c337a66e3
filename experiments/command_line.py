"""From a command line to checked configurations, by Hydra; and from an exception to one clear line.

Hydra composes, sweeps (`-m`) and prints help; what it raises on a bad override is said here in one line that
names the value and the allowed ones.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import plugins
from experiments.bundled_model import BundledModelError
from experiments.comparison import ArmError
from experiments.config import CONFIG_DIR, RunConfig, plugin_file, typed
from experiments.tracking import StoreError, Terminated

BAD_INPUT_STATUS = 2
FAILURE_STATUS = 1
INTERRUPTED_STATUS = 130
# What a user can mend, as preparing a run or a comparison raises it.
BAD_INPUT = (HydraException, OmegaConfBaseException, ValueError, BundledModelError)
SWEEP_FLAGS = ("-m", "--multirun")


class BadInputError(ValueError):
    """The user's input can't be used; the message is the one line they see."""


@dataclass
class Sweep:
    """The points of one command: `sweep_id` is None for a single point. `failures` are lines, one per point,
    and `status` is the exit status that the last of them asks for.

    `studies` are the MLflow experiments that its points were logged under.
    """

    sweep_id: str | None
    failures: list[str] = field(default_factory=list)
    studies: set[str] = field(default_factory=set)
    num_points: int = 0
    status: int = 0


Job = Callable[[RunConfig, Sweep], None]


def run_jobs(job: Job, on_sweep_end: Callable[[Sweep], None], arguments: Sequence[str]) -> int:
    """Compose each point of the command line and run it; returns the exit status.

    A point that fails doesn't keep the others from running: each failure is printed as it happens and again,
    one line each, at the end.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting
    is_sweep = any(argument in SWEEP_FLAGS for argument in arguments)
    sweep = Sweep(uuid.uuid4().hex[:8] if is_sweep else None)
    try:
        status = guarded(lambda: _run_all(job, sweep, arguments))
    finally:
        # Also after Ctrl-C: the points that are done keep their report.
        if is_sweep:
            _end_sweep(sweep, on_sweep_end)
    if status or not is_sweep:
        return status or sweep.status
    return min(sweep.status, FAILURE_STATUS)


def guarded(command: Callable[[], int]) -> int:
    """A command's exit status; a mistake of the user, a full store and a signal are one line on standard error."""
    try:
        return command()
    except (HydraException, OmegaConfBaseException, StoreError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return BAD_INPUT_STATUS
    except KeyboardInterrupt:
        print("interrupted: a run that was under way is logged as KILLED", file=sys.stderr)
        return INTERRUPTED_STATUS
    except Terminated as error:
        print("terminated: a run that was under way is logged as KILLED", file=sys.stderr)
        return int(error.code or FAILURE_STATUS)


def _run_all(job: Job, sweep: Sweep, arguments: Sequence[str]) -> int:
    """The status of what kept all points from running, else 0; `sweep` has the points'."""
    try:
        plugins.register_all(plugin_file(arguments))
        run_hydra = _sweep_main if sweep.sweep_id is not None else _hydra_main
        run_hydra(lambda config: _run_point(job, sweep, config), arguments)
    except ValueError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return BAD_INPUT_STATUS
    return 0


def _end_sweep(sweep: Sweep, on_sweep_end: Callable[[Sweep], None]) -> None:
    try:
        if sweep.studies:
            on_sweep_end(sweep)
    except StoreError as error:
        sweep.failures.append(f"report: {error}")
        sweep.status = FAILURE_STATUS
    for line in sweep.failures:
        print(f"failed: {line}", file=sys.stderr)


def explain(error: BaseException) -> str:
    """One line for a bad configuration, with what would have been allowed."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"unknown {group} '{name}'; known: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return (
            f"can't read the argument '{error.override}': expected key=value, with a value that has brackets, commas "
            "or an equals sign in quotes of its own, as in \"key='a (b)'\""
        )
    if str(error).startswith("Ambiguous value"):
        return f"{_first_line(error)}: add -m to sweep over several values"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return _explain_value(cause) or _first_line(cause)
    if isinstance(error, OmegaConfBaseException) and error.__cause__ is None:
        return _explain_value(error) or _first_line(error)
    return _first_line(error)


def explain_arm(error: Exception) -> str:
    """The same where it may be one arm's of a comparison; raises what is no mistake of the user's."""
    if not isinstance(error, ArmError):
        return explain(error)
    if not isinstance(error.__cause__, BAD_INPUT):
        raise error
    return f"arm '{error.label}': {explain(error.__cause__)}"


def _explain_value(error: OmegaConfBaseException) -> str | None:
    """A key that doesn't exist, with those that do; or a value of the wrong type."""
    node = error.parent_node
    if error.key is None or not isinstance(node, DictConfig):
        return None
    section = (error.full_key or "").rpartition(".")[0]
    if error.key in node:
        return None
    known = sorted(str(key) for key in node if key != "hydra")
    if error.key in known:
        return f"'{error.full_key or error.key}' has no value"
    if not known:
        return f"unknown key '{error.full_key}': this strategy has no {section}"
    close = _nested(node, str(error.key)) or difflib.get_close_matches(str(error.key), known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    where = f" in {section}" if section else ""
    return f"unknown key '{error.full_key or error.key}'; {hint}known{where}: {', '.join(known)}"


def _nested(node: DictConfig, key: str) -> list[str]:
    """Where a key stands deeper in the configuration: `temperature` is `sampling.temperature`."""
    sections = [name for name in node if isinstance(node._get_node(name), DictConfig) and name != "hydra"]
    return [
        f"{name}.{key}" for name in map(str, sections) if not node._is_none() and key in (node[name] or {})
    ]


NO_LIST = "is not a ListConfig, list or tuple"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if NO_LIST in message:
        message = "expected a list, as in [first,second]"
    key = getattr(error, "full_key", None)
    return f"{key}: {message}" if key and key not in message else message


def _sweep_main(run: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    # Hydra insists on writing a multirun.yaml, and wants its flag beside no more than one group of overrides.
    rest = [argument for argument in arguments if argument not in SWEEP_FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        _hydra_main(run, ["-m", *rest, f"hydra.sweep.dir='{folder}'"])


def _hydra_main(run: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")(run)()
    finally:
        sys.argv = before


def _run_point(job: Job, sweep: Sweep, config: DictConfig) -> None:
    sweep.num_points += 1
    try:
        job(_checked(config), sweep)
    except (BadInputError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        _note_failure(sweep, config, str(error), BAD_INPUT_STATUS)
    except Exception as error:
        traceback.print_exc()
        _note_failure(sweep, config, f"{type(error).__name__}: {_first_line(error)}", FAILURE_STATUS)


def _checked(config: DictConfig) -> RunConfig:
    try:
        return typed(config)
    except (OmegaConfBaseException, ValueError) as error:
        raise BadInputError(explain(error)) from error


def _note_failure(sweep: Sweep, config: DictConfig, reason: str, status: int) -> None:
    strategy = OmegaConf.select(config, "strategy", default="?")
    sweep.failures.append(f"point {sweep.num_points} (strategy={strategy}): {reason}")
    sweep.status = status
