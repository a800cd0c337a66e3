"""Prompts that ship with the project, written for it: eight categories, the first eight prompts one of each.

About half ask for text that repeats the prompt (`copy_heavy` in the data), where lookup drafting does well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.workloads.base import Prompt, WorkloadContext, WorkloadOptions, take_prompts

PROMPTS_FILE = Path(__file__).with_name("embedded_prompts.jsonl")


@dataclass
class EmbeddedWorkload(WorkloadOptions):
    """The first `limit` embedded prompts; categories take turns, so a short run still covers all of them."""

    def load(self, context: WorkloadContext) -> list[Prompt]:
        return take_prompts(_read_prompts(), self.limit, PROMPTS_FILE.name)


def _read_prompts() -> Iterator[Prompt]:
    with PROMPTS_FILE.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Prompt(record["id"], record["category"], text=record["prompt"])
