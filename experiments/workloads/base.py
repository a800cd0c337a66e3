"""What a workload is: options that load prompts, and how a prompt becomes token ids.

Knows no model and no file format. A workload is a module beside this one with one dataclass of options; the
module's name is the workload's name in the configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One request: either text, still to be encoded, or token ids taken as they are; exactly one of them."""

    prompt_id: str
    category: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"prompt {self.prompt_id!r} needs exactly one of text and token_ids")


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload may know of the run: ids are below `vocab_size`; `seed` fixes every random choice."""

    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        require_at_least("vocab_size", self.vocab_size, 1)


@dataclass
class WorkloadOptions(ABC):
    """Options every workload has: how many prompts at most, and how many new tokens for each at most."""

    limit: int = 12
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        require_at_least("workload.limit", self.limit, 1)
        require_at_least("workload.max_new_tokens", self.max_new_tokens, 1)

    @abstractmethod
    def load(self, context: WorkloadContext) -> list[Prompt]:
        """Return 1 to `limit` prompts with distinct ids, the same ones for the same options and context.

        Raises ValueError, in one line, if the source is missing, malformed or holds no prompt.
        """


def require_at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError naming the option and its value if it is below the minimum."""
    if value < minimum:
        raise ValueError(f"{name}={value} is not allowed: it must be at least {minimum}")


def require_filled(name: str, value: str, meaning: str) -> None:
    """Raise ValueError naming the option if it was left empty."""
    if not value.strip():
        raise ValueError(f"{name}={value!r} is not allowed: it must be {meaning}")


def take_prompts(prompts: Iterable[Prompt], limit: int, source: str) -> list[Prompt]:
    """Return the first `limit` prompts, reading no further; `source` names their origin in errors.

    Raises ValueError if there is none, or if two share an id: runs are paired by prompt id.
    """
    taken = list(islice(prompts, limit))
    if not taken:
        raise ValueError(f"{source} holds no prompts")
    seen: set[str] = set()
    for prompt in taken:
        if prompt.prompt_id in seen:
            raise ValueError(f"{source} has the prompt id {prompt.prompt_id!r} twice: ids must be unique")
        seen.add(prompt.prompt_id)
    return taken


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids the model reads for this prompt.

    Text goes through the chat template as one user turn with the generation prompt added; a tokenizer without
    a template encodes it plainly with its special tokens. Token ids pass through. Raises ValueError if none
    result.
    """
    token_ids = _text_to_ids(prompt.text, tokenizer) if prompt.text is not None else prompt.token_ids
    if not token_ids:
        raise ValueError(f"prompt {prompt.prompt_id!r} encodes to no tokens")
    return list(token_ids)


def _text_to_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        return cast("list[int]", tokenizer.encode(text, add_special_tokens=True))
    messages = [{"role": "user", "content": text}]
    # transformers 5 returns a BatchEncoding unless told otherwise.
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return cast("list[int]", encoded)
