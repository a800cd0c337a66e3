"""Plug-ins: every module of a group's folder is a choice of that group, under the module's name.

A plug-in module defines one dataclass of options (its fields are the schema, with defaults and checks) with a
method that builds the thing. Nothing else is to be edited: this file scans the folders. A file from outside the
tree joins with `plugin=path/to/file.py`; it names its group in a constant `GROUP`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore

# Where each group's modules live.
GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("quant.weights",),
    "kv": ("specdec.kv_stores", "quant.kv"),
    "decoding": ("specdec.decoding",),
    "drafter": ("specdec.drafters",),
    "verifier": ("specdec.verifiers",),
    "draft_length": ("specdec.draft_length",),
    "workload": ("experiments.workloads",),
    "experiment": ("experiments.studies",),
}
# What the options of a plug-in do, whatever the group.
METHODS = ("build", "load", "convert", "prepare")
# Before the name of an external file's module, which may otherwise be that of any library.
EXTERNAL_PREFIX = "twospeed_plugin_"
_registry: dict[str, dict[str, type]] = {}


def register_all(external: str | None = None) -> None:
    """Register every plug-in's options with Hydra; `external` is one more file.

    Raises ValueError, in one line, for an external file that is missing, is no plug-in, or takes another's name.
    """
    for group, packages in GROUPS.items():
        for package in packages:
            for module in _modules(package):
                _register(group, module.__name__.rpartition(".")[2], module)
    if external is not None:
        module = _load_external(external)
        group = str(getattr(module, "GROUP", None))
        if group not in GROUPS:
            raise ValueError(f"plugin={external}: GROUP={group!r}, expected one of {', '.join(GROUPS)}")
        name = Path(external).stem
        taken = _registry.get(group, {}).get(name)
        if taken is not None and not taken.__module__.startswith(EXTERNAL_PREFIX):
            raise ValueError(f"plugin={external}: {group} '{name}' is taken; rename the file")
        _register(group, name, module)


def known(group: str) -> list[str]:
    """Names of a group's plug-ins, sorted."""
    return sorted(_registry.get(group, {}))


def default_options(group: str, name: str) -> Any:
    """A plug-in's options with their defaults.

    Raises ValueError for an unknown name, listing the known ones.
    """
    return _lookup(group, name)()


def check_choices(options: Any) -> None:
    """Check the fields that name a plug-in of another group, such as a drafter's `weights`; "" is a default.

    Raises ValueError for an unknown name, listing the known ones.
    """
    for field in dataclasses.fields(options):
        chosen = getattr(options, field.name)
        if field.name in GROUPS and chosen != "":
            _lookup(field.name, chosen)


def _lookup(group: str, name: str) -> type:
    if name not in _registry.get(group, {}):
        raise ValueError(f"unknown {group} '{name}'; known: {', '.join(known(group))}")
    return _registry[group][name]


def _modules(package: str) -> Iterator[ModuleType]:
    folder = importlib.import_module(package)
    for found in pkgutil.iter_modules(folder.__path__):
        if found.name != "base" and not found.name.startswith("_"):
            yield importlib.import_module(f"{package}.{found.name}")


def _load_external(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ValueError(f"plugin={path}: no such file")
    return _executed(path, Path(path).resolve(), Path(path).stat().st_mtime_ns)


@cache  # executing a file twice would make second classes of its options, which equal none of the first
def _executed(path: str, place: Path, changed_ns: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXTERNAL_PREFIX + Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"plugin={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # In sys.modules before it runs: dataclasses looks a class's module up by name.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        raise ValueError(f"plugin={path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return module


def _register(group: str, name: str, module: ModuleType) -> None:
    options = _named(name, _options_class(module))
    _registry.setdefault(group, {})[name] = options
    ConfigStore.instance().store(group=group, name=name, node=options)


def _options_class(module: ModuleType) -> type:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
        and any(hasattr(value, method) for method in METHODS)
    ]
    if len(found) != 1:
        raise ValueError(
            f"plug-in {module.__name__}: expected one dataclass of options with a method {' or '.join(METHODS)}, "
            f"found {len(found)}"
        )
    return found[0]


@cache  # registering twice must not make a second class: options of two of them are never equal
def _named(name: str, options: type) -> type:
    """The options with a field `name`, so that a resolved configuration says which plug-in it belongs to."""

    def check_name(self: Any) -> None:
        if self.name != name:
            raise ValueError(f"name={self.name}: choose a plug-in by its group, as in drafter=prompt_lookup")
        if hasattr(options, "__post_init__"):
            options.__post_init__(self)

    return dataclasses.make_dataclass(
        options.__name__,
        [("name", str, dataclasses.field(default=name))],
        bases=(options,),
        namespace={"__post_init__": check_name, "__doc__": options.__doc__, "__module__": options.__module__},
    )
