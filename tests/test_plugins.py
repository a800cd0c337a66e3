"""A plug-in is one file: in the tree, or named on the command line."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import plugins
from experiments.config import compose_run, plugin_file
from specdec.decoding.base import DecodingOptions
from specdec.draft_length.base import DraftLengthOptions
from specdec.drafters.base import DrafterOptions
from specdec.drafters.prompt_lookup import PromptLookupOptions
from specdec.verifiers.base import VerifierOptions

CHECKOUT = Path(__file__).resolve().parents[1]

ECHO = """
    '''Draft the newest token again and again.'''

    from dataclasses import dataclass

    from specdec.drafters.base import Drafter, DrafterOptions
    from specdec.types import DraftProposal

    GROUP = "drafter"


    class EchoDrafter(Drafter):
        def __init__(self, times, device):
            self.times, self.device = times, device

        def propose(self, rows, limits, go_on, draws):
            drafts = [row.token_ids[-1:] * min(limit, self.times) for row, limit in zip(rows, limits)]
            return DraftProposal.certain(drafts, self.device)


    @dataclass
    class EchoOptions(DrafterOptions):
        times: int = 2

        def __post_init__(self):
            if self.times < 1:
                raise ValueError(f"drafter.times={self.times}: expected at least 1")

        def build(self, context):
            return EchoDrafter(self.times, context.device)
"""


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(plugins, "_registry", {})
    plugins.register_all()
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def write(folder: Path, name: str, source: str) -> str:
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(file)


# --- in the tree


def test_every_module_of_a_folder_is_a_choice_and_nothing_else_is() -> None:
    for group, packages in plugins.GROUPS.items():
        files = {
            file.stem
            for package in packages
            for file in (CHECKOUT / package.replace(".", "/")).glob("*.py")
            if file.stem not in ("__init__", "base")
        }
        assert set(plugins.known(group)) == files
        assert plugins.known(group) == sorted(files)


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_every_plugin_has_a_documented_typed_schema_under_its_name(group: str) -> None:
    for name in plugins.known(group):
        if (group, name) == ("workload", "jsonl"):  # has no default: a file must be named
            continue
        if (group, name) == ("workload", "hf"):
            continue
        options = plugins.default_options(group, name)
        assert options.name == name
        assert type(options).__doc__
        assert type(options).__module__.endswith(f".{name}")
        for field in dataclasses.fields(options):
            assert field.type
        assert dataclasses.replace(options) == options


def test_the_plugins_of_this_stage_are_known() -> None:
    expected = {
        "weights": {"plain", "int8", "int4", "bnb_int8", "bnb_nf4", "quanto_int8", "quanto_int4"},
        "kv": {"dense", "per_token", "sealed_groups", "kv_int8", "kv_int4", "kv_int2"},
        "decoding": {"autoregressive", "no_cache", "speculative"},
        "drafter": {"draft_model", "fallback", "layer_skip", "prompt_lookup", "suffix"},
        "verifier": {"block", "match", "token"},
        "draft_length": {"confidence", "cost_model", "fixed"},
        "workload": {"embedded", "hf", "jsonl", "random"},
    }
    for group, names in expected.items():
        assert set(plugins.known(group)) >= names


def test_options_keep_their_class_and_their_checks() -> None:
    options = plugins.default_options("drafter", "prompt_lookup")
    assert isinstance(options, PromptLookupOptions)
    with pytest.raises(ValueError, match="max_ngram=0"):
        dataclasses.replace(options, max_ngram=0)
    with pytest.raises(ValueError, match="choose a plug-in by its group"):
        dataclasses.replace(options, name="draft_model")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("group", "base"),
    [
        ("decoding", DecodingOptions),
        ("drafter", DrafterOptions),
        ("verifier", VerifierOptions),
        ("draft_length", DraftLengthOptions),
    ],
)
def test_options_of_a_group_share_a_base(group: str, base: type) -> None:
    for name in plugins.known(group):
        assert isinstance(plugins.default_options(group, name), base)


def test_registering_again_makes_no_second_class() -> None:
    """Arms are compared by their options: those of two classes would never be equal."""
    before = plugins.default_options("weights", "plain")
    config = compose_run(["strategy=baseline"])
    plugins.register_all()
    assert plugins.default_options("weights", "plain") == before == config.weights
    assert compose_run(["strategy=baseline"]) == config


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = "draft_model, fallback, layer_skip, prompt_lookup, suffix"
    with pytest.raises(ValueError, match=f"unknown drafter 'oracle'; known: {known}$"):
        plugins.default_options("drafter", "oracle")


def test_a_field_that_names_a_plugin_is_checked() -> None:
    drafter = plugins.default_options("drafter", "draft_model")
    plugins.check_choices(drafter)
    plugins.check_choices(dataclasses.replace(drafter, weights="bnb_nf4"))
    with pytest.raises(
        ValueError, match="unknown weights 'int5'; known: bnb_int8, bnb_nf4, int4, int8, plain, quanto_int4"
    ):
        plugins.check_choices(dataclasses.replace(drafter, weights="int5"))


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("int4", {}),
        ("int4 group=64 kernel=torch_int4pack", {"group": 64, "kernel": "torch_int4pack"}),
        ("int4 head=false symmetric=true", {"head": False, "symmetric": True}),
        ('int4 keep=["*.down_proj","a b"]', {"keep": ["*.down_proj", "a b"]}),
        ("bnb_int8 threshold=1e-05", {"threshold": 1e-5}),
    ],
)
def test_options_can_be_written_in_a_field_and_read_again(text: str, changed: dict[str, object]) -> None:
    options = plugins.written_options("weights", text)
    default = plugins.default_options("weights", text.split()[0])
    assert options == dataclasses.replace(default, **changed)
    again = plugins.as_written(options)
    assert sorted(again.split()) == sorted(text.split())
    assert plugins.written_options("weights", again) == options
    drafter = plugins.default_options("drafter", "draft_model")
    plugins.check_choices(dataclasses.replace(drafter, weights=text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int5 group=64", "unknown weights 'int5'; known: "),
        ("group=64", "unknown weights 'group=64'; known: "),
        ("int4 grup=64", "'grup' .*; settings of int4: head, keep, kernel, group, symmetric$"),
        ("int4 group=7", "weights.group=7: expected one of 32, 64, 128"),
        ("int4 group=much", "'much' .*Integer"),
        ("int4 group", "group"),
        ("int4 keep=[", "'int4 keep=\\['"),
        ("int4 group=64'", "settings of int4"),
        ("int4 name=int8", "choose a plug-in by its group"),
    ],
)
def test_what_is_written_wrong_is_refused_in_one_line(text: str, words: str) -> None:
    drafter = plugins.default_options("drafter", "draft_model")
    with pytest.raises(ValueError, match=words) as caught:
        plugins.check_choices(dataclasses.replace(drafter, weights=text))
    assert "\n" not in str(caught.value)
    assert text in str(caught.value) or text.split()[0] in str(caught.value)


# --- from outside the tree


def test_an_external_file_is_a_choice_with_options(tmp_path: Path) -> None:
    plugins.register_all(write(tmp_path, "echo", ECHO))
    assert "echo" in plugins.known("drafter")
    config = compose_run(["strategy=specdec", "drafter=echo", "drafter.times=3"])
    assert (config.drafter.name, config.drafter.times) == ("echo", 3)
    with pytest.raises(Exception, match="at least 1"):
        compose_run(["strategy=specdec", "drafter=echo", "drafter.times=0"])


@pytest.mark.parametrize("name", ["random", "echo-2", "torch"])
def test_an_external_file_may_have_the_name_of_any_module(tmp_path: Path, name: str) -> None:
    before = sys.modules.get(name)
    plugins.register_all(write(tmp_path, name, ECHO))
    assert name in plugins.known("drafter")
    assert sys.modules.get(name) is before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ECHO.replace('GROUP = "drafter"', ""), "GROUP='None', expected one of.*drafter"),
        (ECHO.replace('GROUP = "drafter"', 'GROUP = "drafters"'), "GROUP='drafters', expected one of"),
        ('GROUP = "drafter"', "found 0"),
        (ECHO.replace("def build(", "def make("), "found 0"),
        (ECHO + ECHO.replace("EchoOptions", "MoreOptions"), "found 2"),
        ("def broken(:\n", "SyntaxError"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError.*nothing_of_that_name"),
    ],
    ids=[
        "no group",
        "unknown group",
        "no options",
        "options that build nothing",
        "two options",
        "not Python",
        "a failing import",
    ],
)
def test_a_file_that_is_no_plugin_is_refused_in_one_line(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        plugins.register_all(write(tmp_path, "broken", source))
    assert "\n" not in str(caught.value)
    assert "broken" in str(caught.value)


def test_a_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        plugins.register_all(str(tmp_path / "nowhere.py"))
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(ValueError, match="not a Python file"):
        plugins.register_all(str(tmp_path / "notes.txt"))


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Else `drafter=prompt_lookup` would mean something else than the run's record says."""
    with pytest.raises(ValueError, match="'prompt_lookup' is taken"):
        plugins.register_all(write(tmp_path, "prompt_lookup", ECHO))
    assert isinstance(plugins.default_options("drafter", "prompt_lookup"), PromptLookupOptions)


def test_the_same_external_file_may_be_registered_again(tmp_path: Path) -> None:
    file = write(tmp_path, "echo", ECHO)
    plugins.register_all(file)
    plugins.register_all(file)
    assert "echo" in plugins.known("drafter")


def test_a_quoted_plugin_file_reaches_the_library_entry_too(tmp_path: Path) -> None:
    file = write(tmp_path, "quoted_echo", ECHO)
    config = compose_run([f"plugin='{file}'", "drafter=quoted_echo"])
    assert config.drafter.name == "quoted_echo"
    assert plugin_file([f"plugin='{file}'"]) == file
    assert plugin_file(["seed=1"]) is None
