"""A conversation turn by turn: what it costs to keep it, to read it again, and what the remedies save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from statistics import mean
from typing import ClassVar

from matplotlib.figure import Figure

from experiments.articles.dialogue import Dialogue, Script, Turn
from experiments.articles.findings import Findings, Rows
from experiments.articles.lab import Lab, LimitError
from experiments.articles.study import ArticleOptions
from experiments.plots.curves import Line, Panel, curves

KEPT, AGAIN = "KV kept", "read again"
AFRESH, SUMMARY, CUT = "start afresh", "summarize", "smaller limit"
REQUEST = "Summarize our conversation so far in a few sentences."


@dataclass
class ConversationOptions(ArticleOptions):
    """`turns` messages, the workload's prompts, each answered with `answer_tokens`; `repeats` times, after one more.

    Remedies: `limit`: the newest tokens that are read again where the text is longer; a summary of `summary_tokens`
    every `summary_every` turns; `kv_formats`: caches of fewer bits.
    """

    title: ClassVar[str] = "A conversation, turn by turn"
    stores: ClassVar[str] = "kv_formats"
    uses: ClassVar[Sequence[str]] = ("workload",)

    turns: int = 8
    answer_tokens: int = 16
    repeats: int = 3
    limit: int = 512
    summary_tokens: int = 48
    summary_every: int = 3
    kv_formats: list[str] = field(default_factory=lambda: ["kv_int8", "kv_int4"])

    def __post_init__(self) -> None:
        self.check_at_least(turns=2, answer_tokens=3, repeats=1, limit=1, summary_tokens=3, summary_every=1)

    def measure(self, lab: Lab) -> Findings:
        script = Script(lab.point.pool.tokenizer)
        prompts = [prompt.text or script.decoded(prompt.token_ids or ()) for prompt in lab.point.prompts]
        messages = [prompts[turn % len(prompts)] for turn in range(self.turns)]
        talks: dict[str, Callable[[], Iterator[Turn]]] = {
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
        for name, talk in talks.items():
            said(talk)  # kernels prepare themselves for texts of each length: not counted
            times, (limit, *_) = zip(*(said(talk) for _ in range(self.repeats)), strict=True)
            turns = [Turn.merged(taken) for taken in zip(*times, strict=False)]
            if turns:
                found[name] = turns
            if limit is not None:
                limits[f"{name}, turn {len(turns) + 1}"] = limit
        if not found:
            raise LimitError("; ".join(f"{where}: {why}" for where, why in limits.items()))
        return _findings(found, limits, self)

    def _capacity(self, script: Script, messages: Sequence[str]) -> int:
        texts = [script.opening(messages[0]), *(script.between(message) for message in messages[1:])]
        return sum(map(len, texts)) + len(texts) * self.answer_tokens

    def _kept(self, lab: Lab, script: Script, messages: Sequence[str]) -> Iterator[Turn]:
        """What was said stays in the cache: a turn reads what is new."""
        dialogue = Dialogue(lab, self._capacity(script, messages))
        # The newest token of an answer is not in the cache yet.
        unread: Sequence[int] = ()
        for number, message in enumerate(messages):
            text = script.between(message) if number else script.opening(message)
            turn = dialogue.turn([*unread, *text], self.answer_tokens, is_kept=number > 0)
            unread = turn.answer[-1:]
            yield turn

    def _again(self, lab: Lab, script: Script, messages: Sequence[str], limit: int | None) -> Iterator[Turn]:
        """Nothing is kept between turns: all that was said is read again, or the newest `limit` tokens of it."""
        capacity = self._capacity(script, messages)
        dialogue = Dialogue(lab, min(capacity, limit + self.answer_tokens) if limit else capacity)
        text: list[int] = []
        for number, message in enumerate(messages):
            text += script.between(message) if number else script.opening(message)
            turn = dialogue.turn(text[-limit:] if limit else text, self.answer_tokens, is_kept=False)
            text += turn.answer
            yield turn

    def _afresh(self, lab: Lab, script: Script, messages: Sequence[str]) -> Iterator[Turn]:
        """Each message is a conversation of its own."""
        longest = max(len(script.opening(message)) for message in messages)
        dialogue = Dialogue(lab, longest + self.answer_tokens)
        for message in messages:
            yield dialogue.turn(script.opening(message), self.answer_tokens, is_kept=False)

    def _summarized(self, lab: Lab, script: Script, messages: Sequence[str]) -> Iterator[Turn]:
        """Every few turns the model sums up, and goes on from that; the summing up is in that turn's time."""
        request = script.between(REQUEST)
        # A summary is read again as text, which may be more tokens.
        dialogue = Dialogue(lab, self._capacity(script, messages) + len(request) + 2 * self.summary_tokens)
        unread: Sequence[int] = ()
        for number, message in enumerate(messages):
            summary = None
            if number and number % self.summary_every == 0:
                summary = dialogue.turn([*unread, *request], self.summary_tokens, is_kept=True)
                text = script.opening(f"{script.decoded(summary.answer)}\n\n{message}")
            else:
                text = [*unread, *script.between(message)] if number else script.opening(message)
            turn = dialogue.turn(text, self.answer_tokens, is_kept=number > 0 and summary is None)
            unread = turn.answer[-1:]
            yield replace(turn, summary=summary)


def said(talk: Callable[[], Iterator[Turn]]) -> tuple[list[Turn], str | None]:
    """The turns of a conversation up to one that can't be had, and why that can't."""
    turns: list[Turn] = []
    try:
        for turn in talk():
            turns.append(turn)
    except LimitError as limit:
        return turns, str(limit)
    return turns, None


def _findings(
    found: Mapping[str, Sequence[Turn]], limits: Mapping[str, str], options: ConversationOptions
) -> Findings:
    headline = headline_of(found)
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
        tables={"The last turn, and all of them": _table(found)},
        figures={"conversation.png": _figure(found, headline)},
        notes=[
            *_text_notes(found),
            f"'{SUMMARY}' writes {options.summary_tokens} tokens every {options.summary_every} turns and goes on from "
            "them: that time counts in the next turn's TTFT",
            *_summary_notes(found),
            f"'{CUT}' reads the newest {options.limit} tokens again; what lies before is forgotten",
            f"answers have {options.answer_tokens} tokens, whatever they say; every conversation was held once, not "
            f"counted, then {options.repeats} times: TTFTs are their medians",
        ],
        limits=limits,
    )


def headline_of(found: Mapping[str, Sequence[Turn]]) -> str:
    """About the last turn that was had both ways."""
    if KEPT not in found or AGAIN not in found:
        return f"Of a conversation only this fitted: {', '.join(found)}"
    number = min(len(found[KEPT]), len(found[AGAIN]))
    kept, again = found[KEPT][number - 1], found[AGAIN][number - 1]
    return (
        f"In turn {number} of a conversation reading all {again.read_tokens} tokens again takes "
        f"{again.ttft_ms / kept.ttft_ms:.1f} times as long to the first token as reading the {kept.read_tokens} new "
        f"ones behind a cache of {kept.kv_mib:.3g} MiB"
    )


def _text_notes(found: Mapping[str, Sequence[Turn]]) -> list[str]:
    """Whoever reads again what a cache would hold should say what the cache would have made it say."""
    if KEPT not in found or AGAIN not in found:
        return []
    kept, again = ([token for turn in found[name] for token in turn.answer] for name in (KEPT, AGAIN))
    pairs = list(zip(kept, again, strict=False))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if alike == len(pairs):
        return [f"'{KEPT}' and '{AGAIN}' wrote the same {alike} tokens"]
    return [
        f"'{KEPT}' and '{AGAIN}' wrote the same first {alike} of {len(pairs)} tokens, and other texts from there on: "
        "passes of other shapes round otherwise"
    ]


def _summary_notes(found: Mapping[str, Sequence[Turn]]) -> list[str]:
    summaries = [turn.summary for turn in found.get(SUMMARY, ()) if turn.summary is not None]
    if not summaries:
        return []
    return [
        f"a summary took {mean(one.total_ms for one in summaries):.0f} ms in the mean, behind a cache of up to "
        f"{max(one.kv_mib for one in summaries):.3g} MiB"
    ]


QUANTITIES: dict[str, Callable[[Turn], float]] = {
    "ttft_ms": lambda turn: turn.waited_ms,
    "step_ms": lambda turn: turn.step.median_ms,
    "kv_mib": lambda turn: turn.kv_mib,
}


def _slug(name: str) -> str:
    return name.lower().replace(", ", "_").replace(" ", "_")


def _ttft(turn: Turn) -> str:
    """With the least and the most, a summary before it included."""
    more_ms = turn.waited_ms - turn.ttft_ms
    return f"{turn.waited_ms:.0f} [{min(turn.ttfts_ms) + more_ms:.0f}, {max(turn.ttfts_ms) + more_ms:.0f}]"


def _table(found: Mapping[str, Sequence[Turn]]) -> Rows:
    heading = [
        "",
        "turns",
        "read, tokens",
        "in the cache",
        "TTFT, ms [least, most]",
        "step, ms [quartiles]",
        "KV, MiB",
        "TTFT of all turns, s",
    ]
    return [
        heading,
        *(
            [
                name,
                str(len(talk)),
                str(talk[-1].read_tokens),
                str(talk[-1].context_tokens),
                _ttft(talk[-1]),
                str(talk[-1].step),
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
