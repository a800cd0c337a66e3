"""A conversation turn by turn: what it costs to keep it, to read it again, and what the remedies save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from matplotlib.figure import Figure

from experiments import plugins
from experiments.articles.dialogue import Dialogue, Script, Turn
from experiments.articles.findings import Findings, Rows
from experiments.articles.lab import Lab, LimitError
from experiments.articles.study import ArticleOptions
from experiments.models import LoadedModels
from experiments.plots.curves import Line, Panel, curves
from experiments.point import PreparedPoint

KEPT, AGAIN = "KV kept", "read again"
AFRESH, SUMMARY, CUT = "start afresh", "summarize", "smaller limit"
REQUEST = "Summarize our conversation so far in a few sentences."


@dataclass
class ConversationOptions(ArticleOptions):
    """`turns` messages, the workload's prompts, each answered with `answer_tokens`.

    Remedies: `limit`: the newest tokens that are read again where the text is longer; a summary of `summary_tokens`
    every `summary_every` turns; `kv_formats`: caches of fewer bits.
    """

    title: ClassVar[str] = "A conversation, turn by turn"
    uses: ClassVar[Sequence[str]] = ("workload",)

    turns: int = 8
    answer_tokens: int = 32
    limit: int = 512
    summary_tokens: int = 48
    summary_every: int = 3
    kv_formats: list[str] = field(default_factory=lambda: ["kv_int8", "kv_int4"])

    def __post_init__(self) -> None:
        self.check_at_least(turns=2, answer_tokens=3, limit=1, summary_tokens=3, summary_every=1)

    def point(self, overrides: Sequence[str], loaded: LoadedModels | None = None) -> PreparedPoint:
        for name in self.kv_formats:
            plugins.default_options("kv", name)
        return super().point(overrides, loaded)

    def measure(self, lab: Lab) -> Findings:
        script = Script(lab.point.pool.tokenizer)
        prompts = [prompt.text or script.decoded(prompt.token_ids or ()) for prompt in lab.point.prompts]
        messages = [prompts[turn % len(prompts)] for turn in range(self.turns)]
        talks: dict[str, Callable[[], list[Turn]]] = {
            KEPT: lambda: self._kept(lab, script, messages),
            AGAIN: lambda: self._again(lab, script, messages, None),
            AFRESH: lambda: self._afresh(lab, script, messages),
            SUMMARY: lambda: self._summarized(lab, script, messages),
            CUT: lambda: self._again(lab, script, messages, self.limit),
        }
        for name in self.kv_formats:
            talks[f"{KEPT}, {name}"] = partial(self._kept, lab.varied(kv=name), script, messages)
        found: dict[str, list[Turn]] = {}
        limits: dict[str, str] = {}
        # Kernels prepare themselves on a text that isn't looked at.
        self._kept(lab, script, messages[:1])
        for name, talk in talks.items():
            try:
                found[name] = talk()
            except LimitError as limit:
                limits[name] = str(limit)
        return _findings(found, limits, self)

    def _capacity(self, script: Script, messages: Sequence[str]) -> int:
        texts = [script.opening(messages[0]), *(script.between(message) for message in messages[1:])]
        return sum(map(len, texts)) + len(texts) * self.answer_tokens

    def _kept(self, lab: Lab, script: Script, messages: Sequence[str]) -> list[Turn]:
        """What was said stays in the cache: a turn reads what is new."""
        dialogue = Dialogue(lab, self._capacity(script, messages))
        turns: list[Turn] = []
        for number, message in enumerate(messages):
            text = script.between(message) if number else script.opening(message)
            # The newest token of an answer is not in the cache yet.
            unread = [turns[-1].answer[-1]] if turns else []
            turns.append(dialogue.turn([*unread, *text], self.answer_tokens, is_kept=bool(turns)))
        return turns

    def _again(self, lab: Lab, script: Script, messages: Sequence[str], limit: int | None) -> list[Turn]:
        """Nothing is kept between turns: all that was said is read again, or the newest `limit` tokens of it."""
        dialogue = Dialogue(lab, self._capacity(script, messages))
        turns: list[Turn] = []
        text: list[int] = []
        for number, message in enumerate(messages):
            text += script.between(message) if number else script.opening(message)
            turns.append(dialogue.turn(text[-limit:] if limit else text, self.answer_tokens, is_kept=False))
            text += turns[-1].answer
        return turns

    def _afresh(self, lab: Lab, script: Script, messages: Sequence[str]) -> list[Turn]:
        """Each message is a conversation of its own."""
        longest = max(len(script.opening(message)) for message in messages)
        dialogue = Dialogue(lab, longest + self.answer_tokens)
        return [
            dialogue.turn(script.opening(message), self.answer_tokens, is_kept=False) for message in messages
        ]

    def _summarized(self, lab: Lab, script: Script, messages: Sequence[str]) -> list[Turn]:
        """Every few turns the model sums up, and goes on from that; the summing up is in that turn's time."""
        request = script.between(REQUEST)
        dialogue = Dialogue(lab, self._capacity(script, messages) + len(request) + self.summary_tokens)
        turns: list[Turn] = []
        for number, message in enumerate(messages):
            extra_ms, prefix, is_kept = 0.0, "", bool(turns)
            if number and number % self.summary_every == 0:
                summary = dialogue.turn([turns[-1].answer[-1], *request], self.summary_tokens, is_kept=True)
                extra_ms = summary.ttft_ms + summary.step.median_ms * (self.summary_tokens - 1)
                prefix = script.decoded(summary.answer) + "\n\n"
                is_kept = False
            newest = turns[-1].answer[-1:] if turns else ()
            text = [*newest, *script.between(message)] if is_kept else script.opening(prefix + message)
            turn = dialogue.turn(text, self.answer_tokens, is_kept)
            turns.append(replace(turn, extra_ms=extra_ms))
        return turns


def _findings(
    found: Mapping[str, Sequence[Turn]], limits: Mapping[str, str], options: ConversationOptions
) -> Findings:
    turns = options.turns
    headline = f"In turn {turns} of a conversation "
    if KEPT in found and AGAIN in found:
        kept, again = found[KEPT][-1], found[AGAIN][-1]
        headline += (
            f"reading all {again.read_tokens} tokens again takes {again.ttft_ms / kept.ttft_ms:.1f} times as long to "
            f"the first token as reading the {kept.read_tokens} new ones behind a cache of {kept.kv_mib:.0f} MiB"
        )
    else:
        headline += "not everything fitted"
    curves_ = {
        f"curve_conversation/{_slug(name)}_{quantity}": [
            (number, value(turn)) for number, turn in enumerate(talk, 1)
        ]
        for name, talk in found.items()
        for quantity, value in QUANTITIES.items()
    }
    return Findings(
        headline,
        curves=curves_,
        tables={f"Turn {turns}, and all of them": _table(found)},
        figures={"conversation.png": _figure(found, headline)},
        notes=[
            f"'{SUMMARY}' writes {options.summary_tokens} tokens every {options.summary_every} turns and goes on from "
            "them: that time counts as the next turn's",
            f"'{CUT}' reads the newest {options.limit} tokens again; what lies before is forgotten",
            f"answers have {options.answer_tokens} tokens, whatever they say",
        ],
        limits=limits,
    )


QUANTITIES: dict[str, Callable[[Turn], float]] = {
    "ttft_ms": lambda turn: turn.ttft_ms + turn.extra_ms,
    "step_ms": lambda turn: turn.step.median_ms,
    "kv_mib": lambda turn: turn.kv_mib,
}


def _slug(name: str) -> str:
    return name.lower().replace(", ", "_").replace(" ", "_")


def _table(found: Mapping[str, Sequence[Turn]]) -> Rows:
    heading = ["", "read, tokens", "in the cache", "TTFT, ms", "step, ms", "KV, MiB", "TTFT of all turns, s"]
    return [
        heading,
        *(
            [
                name,
                str(talk[-1].read_tokens),
                str(talk[-1].context_tokens),
                f"{QUANTITIES['ttft_ms'](talk[-1]):.0f}",
                f"{talk[-1].step.median_ms:.1f}",
                f"{talk[-1].kv_mib:.1f}",
                f"{sum(map(QUANTITIES['ttft_ms'], talk)) / 1e3:.2f}",
            ]
            for name, talk in found.items()
        ),
    ]


def _figure(found: Mapping[str, Sequence[Turn]], headline: str) -> Figure | None:
    labels = {
        "ttft_ms": "time to first token, ms",
        "step_ms": "time of a step, ms",
        "kv_mib": "KV cache, MiB",
    }
    panels = [
        Panel(
            [
                Line(name, [(number, QUANTITIES[quantity](turn)) for number, turn in enumerate(talk, 1)])
                for name, talk in found.items()
            ],
            "turn",
            label,
            log_x=False,
            log_y=False,
        )
        for quantity, label in labels.items()
    ]
    return curves(panels, headline)
