"""Who may import whom, and which names are not used: read from the source, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specdec", "quant", "experiments")
# Hydra belongs to the programs that a user starts and to what composes their configuration.
MAY_IMPORT_HYDRA = {
    "config",
    "plugins",
    "command_line",
    "run",
    "compare",
    "certify",
    "watch",
    "ui",
    "replay",
    "advise",
}


@cache
def sources(package: str) -> dict[str, ast.Module]:
    """Syntax trees by module name."""
    trees = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    assert trees
    return trees


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, *, at_run_time: bool = False) -> Iterator[str]:
    """Modules imported anywhere in a file; `at_run_time` leaves out those for the type checker only.

    `from package import name` counts as both, since name may be a module.
    """
    for node in ast.iter_child_nodes(tree):
        if at_run_time and is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, at_run_time=at_run_time)


def imported_packages(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree)}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "specdec",
            {
                "quant",
                "experiments",
                "hydra",
                "omegaconf",
                "mlflow",
                "datasets",
                "bitsandbytes",
                "optimum",
                "tests",
            },
        ),
        ("quant", {"specdec", "experiments", "hydra", "omegaconf", "mlflow", "datasets", "tests"}),
        ("experiments", {"tests"}),
    ],
)
def test_what_a_package_never_imports(package: str, forbidden: set[str]) -> None:
    found = {name: imported_packages(tree) & forbidden for name, tree in sources(package).items()}
    assert {name: bad for name, bad in found.items() if bad} == {}


def test_the_engine_needs_torch_and_transformers_only() -> None:
    import sys

    used = set().union(*(imported_packages(tree) for tree in sources("specdec").values()))
    assert used - sys.stdlib_module_names == {"specdec", "torch", "transformers"}


def importers(module: str) -> set[str]:
    return {
        name
        for package in PACKAGES
        for name, tree in sources(package).items()
        if module in imported_packages(tree)
    }


def test_mlflow_is_imported_by_tracking_only() -> None:
    assert importers("mlflow") <= {"experiments.tracking"}


def test_hydra_is_imported_by_entry_points_and_configuration_only() -> None:
    assert importers("hydra") <= {f"experiments.{name}" for name in MAY_IMPORT_HYDRA}


def test_datasets_is_imported_where_needed_and_late() -> None:
    """A heavy package, so nothing imports it at the top of a file; nor the optional back ends."""
    for package in PACKAGES:
        for name, tree in sources(package).items():
            at_top = {
                module.partition(".")[0]
                for node in tree.body
                if isinstance(node, ast.Import | ast.ImportFrom)
                for module in imports(ast.Module([node], []))
            }
            assert not at_top & {"datasets", "bitsandbytes", "optimum", "llama_cpp", "openvino_genai"}, name


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycles(package: str) -> None:
    """At run time; files of a package import modules, so its `__init__` is not among what they need."""
    modules = sources(package)
    graph = {
        name: {
            module for module in imports(tree, at_run_time=True) if module in modules and module != package
        }
        for name, tree in modules.items()
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(order) >= set(modules)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is given a value, and the line: arguments, assignments, loops, comprehensions, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_nothing_is_called_p_or_q() -> None:
    """The two founding papers use the letters opposite ways."""
    found = [
        f"{name}:{line}: {bound}"
        for name, tree in sources("specdec").items()
        for bound, line in bound_names(tree)
        if bound in {"p", "q"}
    ]
    assert found == []


def test_only_the_adapter_and_the_attention_know_transformers_internals() -> None:
    """Anyone may name the model's class; cache classes and the attention interface have one place each."""
    names = {
        name: {module for module in imports(tree) if module.startswith("transformers.")}
        for name, tree in sources("specdec").items()
    }
    for name, used in names.items():
        allowed = {"transformers.PreTrainedModel"}
        if name == "specdec.attention":
            allowed.add("transformers.AttentionInterface")
        if name != "specdec.hf_adapter":
            assert used <= allowed, name


def test_every_module_says_what_it_is() -> None:
    for package in PACKAGES:
        for name, tree in sources(package).items():
            assert ast.get_docstring(tree) or not tree.body, name


def test_the_decoders_own_no_clock_and_no_global_randomness() -> None:
    for name, tree in sources("specdec").items():
        assert not imported_packages(tree) & {"time", "logging", "random", "rich", "tqdm"}, name
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"torch.manual_seed", "torch.rand", "torch.multinomial", "torch.randn", "print"}, (
            name
        )


def test_the_reader_of_imports_sees_them_all() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\ndef f():\n    from e.f import g\n"
        "if TYPE_CHECKING:\n    import h\ntry:\n    import i\nexcept ImportError:\n    pass\n"
    )
    assert set(imports(tree)) == {"a.b", "c", "c.d", "e.f", "e.f.g", "h", "i"}
    assert "h" not in set(imports(tree, at_run_time=True))
    assert {name for name, _ in bound_names(ast.parse("def f(p, *q): x.y = z = [w for w in v]"))} == set(
        "pqyzw"
    )
