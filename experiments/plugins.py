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
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
# Of what is written as a name with settings. Whitespace within quotes does not part words; the quotes stay.
WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
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

    Raises what `written_options` does.
    """
    for field in dataclasses.fields(options):
        chosen = getattr(options, field.name)
        if field.name in GROUPS and chosen != "":
            written_options(field.name, chosen)


def written_options(group: str, text: str) -> Any:
    """A plug-in's options, as one writes them in a field: its name, then settings where wanted, `int4 group=64`.

    Raises ValueError, in one line, for an unknown name, listing the known ones, and for a setting that is unknown, of
    another type or out of range.
    """
    name, *settings = re.findall(rf"{WORD}|\S", text) or [text]
    schema = _lookup(group, name)
    try:
        given = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.from_dotlist(settings))
        return schema(**cast(dict[str, Any], OmegaConf.to_container(given)))
    except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        known_settings = ", ".join(field.name for field in dataclasses.fields(schema) if field.name != "name")
        reason = " ".join(str(error).split("\n")[0].split())
        raise ValueError(f"{group} '{text}': {reason}; settings of {name}: {known_settings}") from error


def as_written(options: Any) -> str:
    """What `written_options` makes these options of: the name, then the settings that are not the default's."""
    default = type(options)()
    changed = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(default, field.name)
    }
    return " ".join([options.name, *(f"{name}={_as_yaml(value)}" for name, value in changed.items())])


def _as_yaml(value: Any) -> str:
    """In one word: bare where it is a name, else as JSON, which is YAML."""
    is_bare = (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) and yaml.safe_load(value) == value
    )
    return value if is_bare else json.dumps(value, separators=(",", ":"))


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
