"""Random token ids: prompts of an exact length, with nothing in them that a drafter could predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.workloads.base import (
    Prompt,
    WorkloadContext,
    WorkloadOptions,
    require_at_least,
    take_prompts,
)


@dataclass
class RandomWorkload(WorkloadOptions):
    """`limit` prompts of `prompt_tokens` tokens, uniform over the vocabulary, fixed by the run's seed."""

    prompt_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("workload.prompt_tokens", self.prompt_tokens, 1)

    def load(self, context: WorkloadContext) -> list[Prompt]:
        return take_prompts(self._draw_prompts(context), self.limit, "workload=random")

    def _draw_prompts(self, context: WorkloadContext) -> Iterator[Prompt]:
        import torch

        # Prompts are drawn one after the other, so a larger limit keeps the earlier ones.
        generator = torch.Generator().manual_seed(context.seed)
        for index in range(self.limit):
            token_ids = torch.randint(context.vocab_size, (self.prompt_tokens,), generator=generator)
            yield Prompt(f"random-{index}", "random", token_ids=tuple(token_ids.tolist()))
