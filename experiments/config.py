"""The configuration as typed, checked values, and how a command line becomes one.

The classes know nothing of what they configure; Hydra composes them from `conf/` and the plug-ins' schemas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments import plugins

CONFIG_DIR = Path(__file__).parent / "conf"
DTYPES = ("auto", "bf16", "fp16", "fp32", "fp64")
DEVICES = ("auto", "cpu", "cuda")
EXACTNESS = ("tokens", "bitwise")
CEILINGS = ("auto", "refresh", "skip")


def check(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError that names the value and what was expected."""
    if not condition:
        raise ValueError(f"{name}={value}: expected {expected}")


@dataclass
class ModelConfig:
    """`target` and `draft`: `bundled`, a folder, or a Hugging Face id; no draft means a copy of the target."""

    target: str = "bundled"
    revision: str | None = None
    draft: str | None = None
    draft_revision: str | None = None

    def __post_init__(self) -> None:
        if self.draft_revision is not None and self.draft is None:
            raise ValueError(f"model.draft_revision={self.draft_revision}: there is no model.draft")


@dataclass
class SamplingConfig:
    """How the next token is chosen, and where an answer ends; `temperature=0` is greedy.

    `logit_bias`: pairs of a token id and what its logit gains. `bad_words`: never written, as such or behind a space.
    `stop`: strings that end the answer; `stop_token_ids`: tokens that do, besides the model's own, which `ignore_eos`
    leaves out.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[Any] = field(
        default_factory=list
    )  # of lists: OmegaConf knows no type of theirs with whole numbers
    bad_words: list[str] = field(default_factory=list)
    min_new_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check(0 <= self.temperature < float("inf"), "sampling.temperature", self.temperature, "a number >= 0")
        check(
            all(map(_is_bias, self.logit_bias)),
            "sampling.logit_bias",
            self.logit_bias,
            "pairs of a token id and a number, as in [[5,-1.5]]",
        )
        check(all(self.stop), "sampling.stop", self.stop, "strings of at least one character")
        check(all(self.bad_words), "sampling.bad_words", self.bad_words, "words of at least one character")


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    token_id, bias = pair
    return type(token_id) is int and token_id >= 0 and type(bias) in (int, float) and bias < float("inf")


@dataclass
class ExactnessConfig:
    """`tokens`: passes are as large as needed, and low precision may round a token otherwise in a wider pass.

    `bitwise`: strategy and twin run passes of one shape, `pass_tokens` per row (null: the draft length's maximum
    + 1), so that equal texts have equal logits, bit for bit.
    """

    mode: str = "tokens"
    pass_tokens: int | None = None

    def __post_init__(self) -> None:
        check(self.mode in EXACTNESS, "exactness.mode", self.mode, f"one of {', '.join(EXACTNESS)}")
        check(
            self.pass_tokens is None or self.pass_tokens >= 1,
            "exactness.pass_tokens",
            self.pass_tokens,
            "at least 1",
        )
        if self.pass_tokens is not None and self.mode != "bitwise":
            raise ValueError(f"exactness.pass_tokens={self.pass_tokens} is for exactness=bitwise")


@dataclass
class MeasureConfig:
    """`repeats` of the whole workload are measured, after a warm-up of at least `warmup` rounds (0: none).

    `aa`: a reference is measured a second time, which shows the noise. `ceilings`: what the machine can do is looked
    up or measured (`auto`), measured again (`refresh`), or left out (`skip`). `memory`: the strategy is run once
    more, alone in a process of its own, for its peak memory.
    """

    repeats: int = 1
    warmup: int = 2
    aa: bool = True
    ceilings: str = "auto"
    memory: bool = True

    def __post_init__(self) -> None:
        check(self.repeats >= 1, "measure.repeats", self.repeats, "at least 1")
        check(self.warmup >= 0, "measure.warmup", self.warmup, "at least 0")
        check(self.ceilings in CEILINGS, "measure.ceilings", self.ceilings, f"one of {', '.join(CEILINGS)}")


@dataclass
class FidelityConfig:
    """How far the laws of a quantized strategy are from the reference's, and a draft model's from its target's.

    Texts are read in passes of `chunk` tokens; 1 is how plain decoding reads, and takes longest. `text_tokens`: of the
    reference's own answers so many new tokens at most, 0: none. `corpus`: `topics` (Python's own help), `hf` (a
    dataset, with `subset`, `split` and `field`), a text file, or `none`; `corpus_tokens` of it at most.
    """

    chunk: int = 16
    text_tokens: int = 768
    corpus: str = "topics"
    corpus_tokens: int = 512
    dataset: str = ""
    subset: str | None = None
    split: str = "train"
    field: str = "text"

    def __post_init__(self) -> None:
        check(self.chunk >= 1, "fidelity.chunk", self.chunk, "at least 1")
        check(self.text_tokens >= 0, "fidelity.text_tokens", self.text_tokens, "at least 0")
        check(self.corpus_tokens >= 1, "fidelity.corpus_tokens", self.corpus_tokens, "at least 1")
        check(
            bool(self.corpus.strip()),
            "fidelity.corpus",
            repr(self.corpus),
            "topics, none, hf, or a text file",
        )
        if self.corpus == "hf" and not self.dataset.strip():
            raise ValueError("fidelity.corpus=hf needs fidelity.dataset, a dataset name or a local folder")
        own = {"dataset": "", "subset": None, "split": "train", "field": "text"}
        for name, default in own.items():
            if self.corpus != "hf" and getattr(self, name) != default:
                raise ValueError(f"fidelity.{name}={getattr(self, name)} is for fidelity.corpus=hf")


@dataclass
class RunConfig:
    """One measured point. Nodes of type Any are filled by the options class of the chosen plug-in."""

    strategy: str = MISSING
    study: str = "inference"
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: Any = MISSING
    weights: Any = MISSING
    kv: Any = MISSING
    decoding: Any = MISSING
    drafter: Any = None
    verifier: Any = None
    draft_length: Any = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    exactness: ExactnessConfig = field(default_factory=ExactnessConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    fidelity: FidelityConfig = field(default_factory=FidelityConfig)
    batch_size: int = 1
    prefill_chunk: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    plugin: str | None = None
    experiment: Any = None

    def __post_init__(self) -> None:
        check(bool(self.study.strip()), "study", repr(self.study), "the name of an MLflow experiment")
        check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        check(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")
        check(
            self.prefill_chunk is None or self.prefill_chunk >= 1,
            "prefill_chunk",
            self.prefill_chunk,
            "at least 1",
        )
        self._check_decoding()
        self._check_draft_model()
        self._check_exactness()

    def _check_exactness(self) -> None:
        width, drafted = self.exactness.pass_tokens, getattr(self.draft_length, "max", 0)
        check(
            width is None or width > drafted,
            "exactness.pass_tokens",
            width,
            f"at least {drafted + 1}, one more than draft_length.max",
        )

    def _check_draft_model(self) -> None:
        if getattr(self.drafter, "model", None) == "target" and self.model.draft is not None:
            raise ValueError(
                f"model.draft={self.model.draft}: strategy={self.strategy} drafts with a copy of the target "
                "(drafter.model=target); expected model.draft=null, or drafter.model=draft"
            )

    def _check_decoding(self) -> None:
        parts = {"drafter": self.drafter, "verifier": self.verifier, "draft_length": self.draft_length}
        for name, part in parts.items():
            if self.decoding.uses_drafter and part is None:
                raise ValueError(f"decoding={self.decoding.name} needs a {name}")
            if not self.decoding.uses_drafter and part is not None:
                raise ValueError(
                    f"decoding={self.decoding.name} uses no {name}, but {name}={part.name} was given; "
                    "choose strategy=specdec or decoding=speculative"
                )


ConfigStore.instance().store(name="run_schema", node=RunConfig)


def typed(config: DictConfig) -> RunConfig:
    """The checked configuration.

    Raises ValueError or an OmegaConf error for a value out of range, of the wrong type, or missing.
    """
    _refuse_additions(config, "")
    value = OmegaConf.to_object(config)
    assert isinstance(value, RunConfig)
    return value


def _refuse_additions(node: DictConfig, prefix: str) -> None:
    """A key added with `+` that no schema knows would be ignored: refuse it."""
    schema = OmegaConf.get_type(node)
    if not dataclasses.is_dataclass(schema):
        raise ValueError(f"{prefix}{', '.join(map(str, node))}: this strategy has no {prefix.rstrip('.')}")
    for key in map(str, node):
        _check_known(schema, key, prefix)
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _refuse_additions(child, f"{prefix}{key}.")


def _check_known(schema: Any, key: str, prefix: str) -> None:
    known = sorted(f.name for f in dataclasses.fields(schema))
    if key not in known:
        raise ValueError(f"unknown key '{prefix}{key}'; known: {', '.join(known)}")


def from_resolved(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that `dataclasses.asdict` turned into these plain values, as in `config/resolved.yaml`.

    A setting that is not there has its default, so what an older version logged can be read; types are not
    checked again. Raises ValueError, in one line, for an unknown key or plug-in (listing the known ones), a
    value that is missing or out of range, or whatever is wrong with the file of `plugin`.
    """
    plugins.register_all(values.get("plugin"))
    return _filled(RunConfig, values, "")


def _filled(schema: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of a dataclass; `prefix` is where it stands, as in `workload.`."""
    types = get_type_hints(schema)
    arguments = {}
    for key, value in values.items():
        _check_known(schema, key, prefix)
        arguments[key] = _from_plain(types[key], value, f"{prefix}{key}")
    for one in dataclasses.fields(schema):
        if one.default == MISSING and arguments.get(one.name) is None:
            raise ValueError(f"'{prefix}{one.name}' has no value")
    return schema(**arguments)


def _from_plain(schema: Any, value: Any, key: str) -> Any:
    is_plugin = key in plugins.GROUPS
    if value is None or not (is_plugin or dataclasses.is_dataclass(schema)):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value}: expected the settings of {key}, by name")
    if is_plugin and "name" not in value:
        raise ValueError(f"'{key}.name' has no value; known: {', '.join(plugins.known(key))}")
    return _filled(plugins._lookup(key, str(value["name"])) if is_plugin else schema, value, f"{key}.")


def plugin_file(overrides: Sequence[str]) -> str | None:
    """The file of `plugin=FILE` among overrides, quoted as Hydra understands it: needed before Hydra composes."""
    assignments = [override for override in overrides if override.startswith("plugin=")]
    found = [override.value() for override in OverridesParser.create().parse_overrides(assignments)]
    return str(found[-1]) if found and found[-1] is not None else None


def given_overrides() -> list[str]:
    """What the command line says, as Hydra was given it, but for the choice of an experiment and its options."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [
        override for override in given if override.lstrip("+").split("=")[0].split(".")[0] != "experiment"
    ]


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """The configuration that `python -m experiments.run OVERRIDES` would use, for scripts and notebooks."""
    plugins.register_all(plugin_file(overrides))
    with _hydra_to_itself(), initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIR)):
        return typed(compose("config", overrides=list(overrides)))


@contextmanager
def _hydra_to_itself() -> Iterator[None]:
    """Hydra has one state per process; an experiment composes its arms while a command line has it."""
    state = GlobalHydra.instance()
    before, state.hydra = state.hydra, None
    try:
        yield
    finally:
        state.hydra = before
