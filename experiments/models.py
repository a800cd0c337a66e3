"""Models and tokenizers by name: the bundled model, a folder, or a Hugging Face id; safetensors, no remote code."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from experiments import bundled_model, plugins
from experiments.config import ModelConfig
from quant.plan import WeightsPlan

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# The draft of a model without a draft model of its own is its copy in this format.
SELF_DRAFT_WEIGHTS = "int4"
BUNDLED = "bundled"


@dataclass(frozen=True)
class ModelSource:
    """Where one model is loaded from. `role` names the setting in errors: `model.target` or `model.draft`."""

    role: str
    name: str
    revision: str | None

    def location(self) -> str:
        """A folder, or a hub id.

        Raises ValueError for a folder without a model; BundledModelError where the bundled one can't be made.
        """
        if self.name == BUNDLED:
            if self.revision is not None:
                raise ValueError(
                    f"{self.role}=bundled has no revisions, but revision={self.revision} was given"
                )
            return str(bundled_model.fetch())
        folder = Path(self.name)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ValueError(f"{self.role}={self.name}: the folder holds no model (no config.json)")
        if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.name):
            raise ValueError(f"{self.role}={self.name}: no such folder, and not a Hugging Face id")
        return self.name

    def config(self) -> Any:
        return self._load(AutoConfig)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load(AutoTokenizer)

    def model(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        model = self._load(AutoModelForCausalLM, dtype=dtype, use_safetensors=True)
        return model.to(device).eval()

    def _load(self, loader: Any, **options: Any) -> Any:
        try:
            return loader.from_pretrained(
                self.location(), revision=self.revision, trust_remote_code=False, **options
            )
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            if isinstance(error, ValueError) and str(error).startswith(self.role):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.role}={self.name}: can't be loaded: {reason[:300]}") from error


@dataclass(frozen=True)
class LoadedModels:
    """What pools may have in common: models, and what is known of them before they are loaded.

    `models` by source, revision, dtype, device and weight format; `skeletons`, which have shapes only, by configuration
    and dtype; `plans` of a skeleton by device, threads and weight format as well.
    """

    models: dict[str, PreTrainedModel] = field(default_factory=dict)
    skeletons: dict[str, PreTrainedModel] = field(default_factory=dict)
    plans: dict[str, WeightsPlan | None] = field(default_factory=dict)


class ModelPool:
    """The models of one run, each loaded and planned once: arms that share a target share its weights.

    Pools that are given the same `loaded` share models and plans too. Raises ValueError when the draft model's tokens
    are not the target's; the width of its logits may be another.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        loaded: LoadedModels | None = None,
    ) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.dtype = dtype
        self.device = device
        self._target = ModelSource("model.target", config.target, config.revision)
        self._draft = (
            None if config.draft is None else ModelSource("model.draft", config.draft, config.draft_revision)
        )
        self.target_config = self._target.config()
        self.draft_config: Any = None
        self.tokenizer = self._target.tokenizer()
        # by setting, as in "model.draft=some/folder"
        self.configs = {f"{self._target.role}={self._target.name}": self.target_config}
        if self._draft is not None:
            self.draft_config = self._draft.config()
            self.configs[f"{self._draft.role}={self._draft.name}"] = self.draft_config
            self._check_vocabulary(self._draft)
        self._loaded = LoadedModels() if loaded is None else loaded
        # What converting weights took, repacking and compiling for a kernel included; loading them is not.
        self.conversion_s = 0.0

    def target(self, weights: Any) -> PreTrainedModel:
        """The target in a weight format (its options)."""
        return self._get(self._target, weights, "weights")

    def draft(self, weights: str) -> PreTrainedModel:
        """The draft model in a weight format (as written, or "" for `default_draft_weights`)."""
        return self._drafting(self._draft or self._target, weights or self.default_draft_weights)

    def target_copy(self, weights: str) -> PreTrainedModel:
        """The target as a draft model, in a weight format (as written, or "" for the default of such copies)."""
        return self._drafting(self._target, weights or SELF_DRAFT_WEIGHTS)

    @property
    def vocab_size(self) -> int:
        """How many tokens both models have logits for: all laws are over them, padding of the wider one is cut."""
        return min(config.vocab_size for config in self.configs.values())

    def target_plan(self, weights: Any) -> WeightsPlan | None:
        """How the target will be stored in a format (its options), and by which kernels it will be multiplied.

        None for a format that has nothing to tell. Loads nothing. Raises ValueError, in one line, where the format
        can't hold the model.
        """
        return self._plan(self.target_config, weights, "weights")

    def draft_plan(self, weights: str) -> WeightsPlan | None:
        """The same of a draft model, or of the copy of the target that drafts."""
        return self._plan(*self._draft_setting(weights))

    def resolved_target(self, weights: Any) -> Any:
        """The format (its options) with every `auto` replaced by what its plan chose. Raises what the plan does."""
        return self._resolved(self.target_config, weights, "weights")

    def resolved_draft(self, weights: str) -> str:
        """The same of a draft model's, as written."""
        return plugins.as_written(self._resolved(*self._draft_setting(weights)))

    @property
    def default_draft_weights(self) -> str:
        """A copy of the target would be as slow as the target, so it is quantized; a draft model is used as it is."""
        return SELF_DRAFT_WEIGHTS if self._draft is None else "plain"

    @property
    def draft_is_target(self) -> bool:
        """No draft model is named: the draft is the target again, in another weight format."""
        return self._draft is None

    @property
    def revision(self) -> str | None:
        """The commit the target was loaded from, where it came from a hub."""
        return getattr(self.target_config, "_commit_hash", None)

    @property
    def draft_revision(self) -> str | None:
        """The same of a draft model."""
        return getattr(self.draft_config, "_commit_hash", None)

    def _drafting(self, source: ModelSource, weights: str) -> PreTrainedModel:
        return self._get(source, plugins.written_options("weights", weights), "drafter.weights")

    def _draft_setting(self, weights: str) -> tuple[Any, Any, str]:
        """Of the model that drafts: its configuration, its format's options, and what sets that."""
        options = plugins.written_options("weights", weights or self.default_draft_weights)
        return self.draft_config or self.target_config, options, "drafter.weights"

    def _get(self, source: ModelSource, weights: Any, setting: str) -> PreTrainedModel:
        key = f"{source.name}@{source.revision} {self.dtype} {self.device} {weights}"
        models = self._loaded.models
        if key not in models:
            model = source.model(self.dtype, self.device)
            start_s = time.perf_counter()
            try:
                models[key] = weights.convert(model)
            except ValueError as error:
                raise ValueError(f"{setting}={weights.name}: {error}") from error
            self.conversion_s += time.perf_counter() - start_s
        return models[key]

    def _plan(self, config: Any, weights: Any, setting: str) -> WeightsPlan | None:
        plans, key = self._loaded.plans, self._plan_key(config, weights)
        if key not in plans:
            try:
                plans[key] = weights.plan(self._skeleton(config), self.device, self.dtype)
            except ValueError as error:
                raise ValueError(f"{setting}={weights.name}: {error}") from error
        return plans[key]

    def _resolved(self, config: Any, weights: Any, setting: str) -> Any:
        plan = self._plan(config, weights, setting)
        if plan is None:
            return weights
        resolved = weights.resolved(plan)
        # What was chosen has the very plan by which it was; that also says why.
        self._loaded.plans[self._plan_key(config, resolved)] = plan
        return resolved

    def _plan_key(self, config: Any, weights: Any) -> str:
        # Which kernel is the cheapest depends on the threads.
        return f"{config} {self.dtype} {self.device} {torch.get_num_threads()} {weights}"

    def _skeleton(self, config: Any) -> PreTrainedModel:
        skeletons, key = self._loaded.skeletons, f"{config} {self.dtype}"
        if key not in skeletons:
            own = copy.deepcopy(config)  # it is written to, and what models are known by must not change
            with torch.device("meta"):
                skeletons[key] = AutoModelForCausalLM.from_config(own, dtype=self.dtype)
        return skeletons[key]

    def _check_vocabulary(self, draft: ModelSource) -> None:
        target_width, draft_width = self.target_config.vocab_size, self.draft_config.vocab_size
        widths = f"logits for {draft_width} tokens there, {target_width} here"
        theirs, ours = draft.tokenizer().get_vocab(), self.tokenizer.get_vocab()
        if theirs != ours:
            token = next(token for token in sorted({*theirs, *ours}) if theirs.get(token) != ours.get(token))
            raise ValueError(
                f"model.draft={draft.name} has another vocabulary than the target: "
                f"token {token!r} is {theirs.get(token)} there, {ours.get(token)} here ({widths})"
            )
        beyond = [token for token, token_id in ours.items() if token_id >= self.vocab_size]
        if target_width != draft_width and beyond:
            token = min(beyond, key=lambda token: ours[token])
            raise ValueError(
                f"model.draft={draft.name} has not all tokens in common with the target: {widths}, "
                f"but token {token!r} is {ours[token]}"
            )


def torch_dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ValueError for CUDA where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device=cuda: this torch sees no CUDA device; use device=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> str:
    """`auto` is bf16 where it is native, fp32 elsewhere."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"
