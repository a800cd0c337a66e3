"""How watched answers look: kinds of tokens by colour on a terminal, bare text anywhere else.

On a terminal the newest lines of each answer are drawn anew after each step, and the whole at the end. Elsewhere
nothing is drawn twice: one answer is written as it comes, two one below the other when both are done, and only the
figures say how many tokens of each kind there were (FORCE_COLOR colours them there too, NO_COLOR nowhere).
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from rich.console import Group
from rich.live import Live
from rich.text import Text

from experiments import metrics
from experiments.point import PreparedPoint
from experiments.report import threads, variant, vocabulary_lines
from experiments.terminal import OUT
from experiments.token_stream import UNREADABLE, Piece
from experiments.watched import Watched
from specdec.types import TokenKind

# Not by colour alone: some don't see it, some terminals have none.
STYLES = {
    TokenKind.ACCEPTED: "green",
    TokenKind.RECOVERED: "underline red",
    TokenKind.BONUS: "bold cyan",
    TokenKind.PLAIN: "",
}
MEANINGS = {
    TokenKind.ACCEPTED: "draft token",
    TokenKind.RECOVERED: "after a rejected one",
    TokenKind.BONUS: "after drafts that all stand",
    TokenKind.PLAIN: "nothing was drafted",
}
RECENT_STEPS = 8
GAP = 3
LEAST_WIDTH = 16
LEAST_LINES = 3
CONTROL_PICTURES = 0x2400
# A long answer takes some milliseconds to draw: this leaves most of the time to the decoder.
LEAST_INTERVAL_S = 0.05


@contextmanager
def watching(arms: Sequence[Watched]) -> Iterator[Callable[[], None]]:
    """What is given is to be called after each step; however the block ends, the answers so far stand there then."""
    if OUT.color_system is not None:
        OUT.print(legend())
    OUT.print()
    try:
        if OUT.file.isatty() and not OUT.is_dumb_terminal:
            yield from _drawn(arms)
        elif len(arms) == 1:
            yield from _written(arms[0])
        else:
            yield from _written_at_the_end(arms)
    finally:
        OUT.print()


def _drawn(arms: Sequence[Watched]) -> Iterator[Callable[[], None]]:
    # No refresh thread: the screen changes between steps, never while one is timed.
    screen = Live(console=OUT, auto_refresh=False, transient=True)

    drawn_s = -LEAST_INTERVAL_S

    def draw() -> None:
        nonlocal drawn_s
        if time.perf_counter() - drawn_s >= LEAST_INTERVAL_S:
            screen.update(Group(*rows(arms, OUT.width, OUT.height)), refresh=True)
            drawn_s = time.perf_counter()

    try:
        with screen:
            draw()
            yield draw
    finally:
        OUT.print(*rows(arms, OUT.width), sep="\n")


def _written(arm: Watched) -> Iterator[Callable[[], None]]:
    num_written = 0

    def write() -> None:
        nonlocal num_written
        for piece in arm.pieces[num_written:]:
            # Not as print does, which would wrap lines and expand tabs.
            OUT.out(visible(piece.text), style=STYLES[piece.kind] or None, highlight=False, end="")
        num_written = len(arm.pieces)

    try:
        yield write
    finally:
        write()
        OUT.out()


def _written_at_the_end(arms: Sequence[Watched]) -> Iterator[Callable[[], None]]:
    try:
        yield lambda: None
    finally:
        for arm in arms:
            OUT.out(f"[{arm.label}]", highlight=False)
            for _ in _written(arm):
                pass


def rows(arms: Sequence[Watched], width: int, height: int | None = None) -> list[Text]:
    """Answers side by side in lines of at most `width`; no more than `height` lines, the newest, with figures below."""
    column = max(LEAST_WIDTH, (width - GAP * (len(arms) - 1)) // len(arms))
    heads = [wrapped(Text(arm.label, "bold"), column) if len(arms) > 1 else [] for arm in arms]
    bodies = [wrapped(answer(arm.pieces), column) for arm in arms]
    if height is None:
        return [*_beside(heads, column), *_beside(bodies, column)]
    feet = [wrapped(Text(f"\n{state(arm)}", "dim"), column) for arm in arms]
    taken = max(map(len, heads)) + max(map(len, feet)) + 1  # and one for the cursor
    bodies = [lines[-max(LEAST_LINES, height - taken) :] for lines in bodies]
    return [*_beside(heads, column), *_beside(bodies, column), *_beside(feet, column)]


def _beside(columns: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Columns of lines as rows."""
    found = []
    for cells in zip_longest(*columns, fillvalue=Text()):
        row = Text()
        for number, cell in enumerate(cells):
            row.pad_right(number * (width + GAP) - row.cell_len)
            row.append_text(cell)
        found.append(row)
    return found


def wrapped(text: Text, width: int) -> list[Text]:
    """Lines that end between words, whatever kinds of tokens a word is made of."""
    return list(text.wrap(OUT, width, overflow="fold", tab_size=4))


def answer(pieces: Sequence[Piece]) -> Text:
    """Each piece in the colour of its kind, but for the blanks around it."""
    text = Text()
    for piece in pieces:
        inside = piece.text.strip()
        before, _, after = piece.text.partition(inside) if inside else (piece.text, "", "")
        text.append(visible(before)).append(visible(inside), STYLES[piece.kind]).append(visible(after))
    return text


def visible(text: str) -> str:
    """Control characters as pictures of themselves: what a model writes must not steer a terminal."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) != "Cc":
        return character
    return chr(CONTROL_PICTURES + ord(character)) if ord(character) < 0x20 else UNREADABLE


def legend() -> Text:
    """The colours, and what they stand for."""
    parts = []
    for kind, style in STYLES.items():
        parts.append(Text.assemble((str(kind), style), f": {MEANINGS[kind]}"))
    return Text("; ").join(parts)


def setting_lines(labels: Sequence[str], points: Sequence[PreparedPoint]) -> list[str]:
    """What is about to answer, before anything is loaded."""
    lines = [f"{label}: {variant(point.arms.strategy)}" for label, point in zip(labels, points, strict=True)]
    for point in points:
        config = point.config
        (request,) = point.requests
        lines += [
            f"{config.model.target}, {config.device}, {config.dtype}, {threads(config.threads)}; "
            f"prompt of {len(request.prompt_ids)} tokens, {request.max_new_tokens} new at most, seed {config.seed}",
            *vocabulary_lines(point),
        ]
    rounds = points[0].config.measure.warmup
    return [*dict.fromkeys(lines), "loads, warms up, then answers" if rounds else "loads, then answers"]


def state(arm: Watched) -> str:
    """The figures of an answer that is being written; the rate is that of its newest steps."""
    trace = arm.trace
    if not trace.steps:
        return "reading the prompt"
    first, *later = trace.steps
    newest = later[-RECENT_STEPS:]
    seconds = sum(step.duration_s for step in newest)
    rate = sum(len(step.output.committed[0]) for step in newest) / seconds if seconds else None
    return (
        f"{len(arm.token_ids)} tokens, {metrics.passes([trace])['passes/target']:.0f} passes, "
        f"TTFT {1e3 * first.duration_s:.0f} ms" + (f", {rate:.1f} tokens/s" if rate else "")
    )


def summary_lines(arms: Sequence[Watched]) -> list[str]:
    """The figures of each answer, and what they were measured in."""
    if not arms:
        return []
    named = len(arms) > 1
    lines = [f"{arm.label}: {line}" if named else line for arm in arms for line in _summary(arm)]
    if named:
        lines += _likeness(arms[0], arms[1])
    return [*lines, *_remarks(arms)]


def _summary(arm: Watched) -> list[str]:
    figures = arm.metrics
    if not figures:
        return [f"no token yet; {arm.end}"]
    num_tokens, num_passes = len(arm.token_ids), int(figures["passes/target"])
    tokens = f"{_counted(num_tokens, 'token')} in {_counted(num_passes, 'target pass', 'es')}"
    if "spec/tokens_per_pass" in figures:
        tokens += f" ({figures['spec/tokens_per_pass']:.2f} a pass after the prompt's)"
    kinds = " + ".join(f"{arm.kinds[kind]} {kind}" for kind in TokenKind if arm.kinds[kind])
    times = [f"TTFT {figures['latency/ttft_ms.p50']:.1f} ms"]
    if "latency/itl_ms.p50" in figures:
        times.append(f"ITL median {figures['latency/itl_ms.p50']:.1f} ms")
    if "throughput/decode_tok_s_request.mean" in figures:
        times.append(f"{figures['throughput/decode_tok_s_request.mean']:.1f} tokens/s after the first")
    accepted = figures.get("spec/acceptance_rate")
    share = "" if accepted is None else f"; {100 * accepted:.0f} % of draft tokens accepted"
    return [f"{tokens}: {kinds}{share}", f"{', '.join(times)}; ended by: {arm.end}"]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _likeness(one: Watched, other: Watched) -> list[str]:
    """Nothing of targets that may have other tokens."""
    if one.point.config.model.target != other.point.config.model.target:
        return []
    if one.token_ids == other.token_ids:
        return ["both texts are the same, token for token"]
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    shortest = min(len(one.token_ids), len(other.token_ids))
    alike = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), shortest)
    return [f"the first {alike} tokens of both texts are the same"]


def _remarks(arms: Sequence[Watched]) -> list[str]:
    config = arms[0].point.config
    lines = ["times are the decoder's own, without drawing"]
    if len(arms) > 1:
        lines = [
            "times are each decoder's own: they compute in turn, next the one whose clock is behind; "
            "experiments.compare gives verdicts"
        ]
    if config.measure.warmup == 0:
        lines.append("not warmed up (measure.warmup=0): TTFT includes what a first pass prepares")
    lines += [f"{arm.label}: step times still moved after the warm-up" for arm in arms if not arm.is_settled]
    return lines
