"""`python -m experiments.watch`, end to end, on tiny real models: what is shown, counted, timed, and refused."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from toy_folders import EOS_ID, repeating_prompts, save_model, words
from toy_models import CONTEXT_LENGTH

from experiments import watch, watch_view, watched
from experiments.config import compose_run
from experiments.point import prepare
from experiments.token_stream import Piece
from experiments.watched import Stopwatch, Watched
from specdec.types import TokenKind

CHECKOUT = Path(__file__).resolve().parents[1]
(PROMPT,) = repeating_prompts([6])
QUESTION = words(PROMPT)
NEW_TOKENS = 24
LOOKUP = "prompt_lookup draft_length.max=3"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Workplace:
    root: Path

    def arguments(self, *more: str) -> list[str]:
        """The smallest question, with what is given added or replaced."""
        base = {
            "model.target": f"{self.root / 'target'}",
            "workload.max_new_tokens": str(NEW_TOKENS),
            "dtype": "fp32",
            "threads": "1",
            "sampling.logit_bias": f"[[{EOS_ID},-1000]]",  # the answer goes on to the limit
        }
        given = {argument.partition("=")[0] for argument in more}
        return [*more, *(f"{key}={value}" for key, value in base.items() if key not in given)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("watch")
    save_model(root / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        yield Workplace(root)
    assert not (root / "store.db").exists()  # nothing is logged


class TerminalFile(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TerminalFile]:
    """A terminal in the place of standard output; what is written to it is returned."""

    def make(width: int = 60, height: int = 20, **options: Any) -> TerminalFile:
        file = TerminalFile()
        options = {"force_terminal": True, "color_system": "standard", "legacy_windows": False, **options}
        console = Console(file=file, width=width, height=height, highlight=False, soft_wrap=True, **options)
        monkeypatch.setattr(watch_view, "OUT", console)
        monkeypatch.setattr(watch_view, "LEAST_INTERVAL_S", 0.0)
        return file

    return make


def point_of(place: Workplace, *more: str) -> Any:
    (point,) = watch.Question.parse([QUESTION, *place.arguments(*more)]).prepare()
    return point


def shown_text(out: str) -> str:
    """The answer of an output that is no terminal's."""
    return out.partition("then answers\n\n")[2].partition("\n\n")[0]


def figures(out: str) -> tuple[int, int, dict[str, int]]:
    """Tokens, passes and counts by kind, of the line that says them."""
    found = re.search(r"(\d+) tokens in (\d+) target passes.*?: (\d[^;\n]*)", out)
    assert found is not None
    counts = [part.split(" ") for part in found[3].split(" + ")]
    return int(found[1]), int(found[2]), {kind: int(count) for count, kind in counts}


# --- what is shown


@pytest.mark.parametrize("strategy", ["baseline", LOOKUP, "specdec drafter.weights=plain", "no_cache"])
def test_the_answer_is_the_engines_and_its_tokens_are_counted(
    place: Workplace, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    assert watch.main([QUESTION, *place.arguments(f"strategy={strategy}", "measure.warmup=1")]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out
    num_tokens, num_passes, counts = figures(shown.out)
    assert sum(counts.values()) == num_tokens == NEW_TOKENS
    own = num_tokens - counts.get("accepted", 0)
    assert own == num_passes
    assert ("accepted" in counts) == (strategy not in ("baseline", "no_cache"))
    answer = shown_text(shown.out)
    assert len(answer.split()) == NEW_TOKENS
    assert watch.main([QUESTION, *place.arguments("strategy=baseline", "measure.warmup=0")]) == 0
    assert shown_text(capsys.readouterr().out) == answer
    assert "ended by: limit of 24 tokens" in shown.out


def test_the_question_is_encoded_and_answered_as_a_prompt_of_a_run(place: Workplace, tmp_path: Path) -> None:
    point = point_of(place, "strategy=baseline", "sampling.temperature=0.9", "seed=5", "measure.warmup=0")
    file = tmp_path / "prompt.jsonl"
    file.write_text(f'{{"prompt": "{QUESTION}"}}\n', encoding="utf-8")
    overrides = place.arguments(
        "workload=jsonl", f"workload.path={file}", "strategy=baseline", "sampling.temperature=0.9", "seed=5"
    )
    same = prepare(compose_run(overrides))
    assert same.requests == point.requests
    arm = Watched("x", point)
    watched.race([arm], lambda: None)
    steps = same.entry(same.arms.strategy).build().generate(same.requests)
    assert [token for step in steps for token in step.committed[0]] == arm.token_ids


def test_text_is_no_markup_and_steers_no_terminal(terminal: Callable[..., TerminalFile]) -> None:
    text = watch_view.answer([Piece("[bold]a :smile:\x1b[31m\r\x9b2J\tb\n", TokenKind.PLAIN)])
    assert text.plain == "[bold]a :smile:␛[31m␍�2J\tb\n"
    file = terminal()
    watch_view.OUT.print(text)
    assert file.getvalue().startswith("[bold]a :smile:␛[31m")


def test_a_word_of_several_kinds_is_one_word() -> None:
    """It wraps as a whole, and blanks have no style of their own, underlined or not."""
    kinds = [TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS]
    pieces = [Piece(text, kinds[number % 3]) for number, text in enumerate([" aaa", " bb", "cc", "dd"])]
    text = watch_view.answer(pieces)
    assert [line.plain.rstrip() for line in watch_view.wrapped(text, 9)] == [" aaa", "bbccdd"]
    assert [(span.start, span.end, span.style) for span in text.spans if span.start < span.end] == [
        (1, 4, "green"),
        (5, 7, "underline red"),
        (7, 9, "bold cyan"),
        (9, 11, "green"),
    ]


def test_on_a_terminal_kinds_have_colours_and_the_whole_text_stays(
    place: Workplace, terminal: Callable[..., TerminalFile], capsys: pytest.CaptureFixture[str]
) -> None:
    file = terminal(width=30, height=6)
    arguments = place.arguments(f"strategy={LOOKUP}", "measure.warmup=0")
    assert watch.main([QUESTION, *arguments]) == 0
    everything = file.getvalue()
    legend, *_ = everything.split("\n")
    assert "\x1b[32maccepted\x1b[0m: draft token" in legend
    # What is behind the last line that was taken away is what stays.
    left = everything.rpartition("\x1b[2K")[2]
    capsys.readouterr()
    assert watch.main([QUESTION, *arguments]) == 0
    assert CONTROL.sub("", left).split() == CONTROL.sub("", everything.rpartition("\x1b[2K")[2]).split()
    assert len(CONTROL.sub("", left).split()) == NEW_TOKENS
    assert re.search(r"\x1b\[32mw\d+\x1b\[0m", left)
    frames = everything.split("\x1b[?25l")[1].split("\r\x1b[2K")
    assert max(frame.count("\n") for frame in frames[:-1]) < 6
    assert "passes, TTFT" in everything


def test_what_is_drawn_fits_the_terminal(place: Workplace) -> None:
    arms = [
        Watched(label, point_of(place, f"strategy={label}", "measure.warmup=0"))
        for label in ("baseline", LOOKUP)
    ]
    watched.race(arms, lambda: None)
    for width, height in itertools.product((40, 79), (4, 12, 40)):
        whole = watch_view.rows(arms, width)
        drawn = watch_view.rows(arms, width, height)
        assert max(row.cell_len for row in [*whole, *drawn]) <= width
        assert len(drawn) <= max(height, 9)
        left, right = ("\n".join(row.plain[half] for row in whole).split() for half in _halves(width))
        assert left[1:] == right[-NEW_TOKENS:]


def _halves(width: int) -> tuple[slice, slice]:
    column = (width - watch_view.GAP) // 2
    return slice(0, column), slice(column, None)


def test_no_color_and_a_forced_pipe(place: Workplace, terminal: Callable[..., TerminalFile]) -> None:
    arguments = [QUESTION, *place.arguments(f"strategy={LOOKUP}", "measure.warmup=0")]
    file = terminal(no_color=True)
    assert watch.main(arguments) == 0
    assert "\x1b[4mrecovered" in file.getvalue()  # attributes are no colours
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())
    file = terminal()
    file.isatty = lambda: False  # type: ignore[method-assign]
    assert watch.main(arguments) == 0
    assert "\x1b[32m" in file.getvalue()
    assert not re.search(r"\x1b\[[0-9;?]*[A-Zhl]", file.getvalue())  # no cursor is moved or hidden


def test_a_pipe_gets_the_text_as_it_comes(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def step(self: Watched) -> None:
        real_step(self)
        seen.append(capsys.readouterr().out)

    real_step = Watched.step
    monkeypatch.setattr(Watched, "step", step)
    assert watch.main([QUESTION, *place.arguments("strategy=baseline", "measure.warmup=0")]) == 0
    assert [len(part.split()) for part in seen[1:]] == [1] * (NEW_TOKENS - 1)


# --- stops


def test_what_ends_an_answer_is_said_and_not_shown(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*more: str) -> tuple[list[str], str]:
        arguments = place.arguments(f"strategy={LOOKUP}", "measure.warmup=0", *more)
        assert watch.main([QUESTION, *arguments]) == 0
        out = capsys.readouterr().out
        return shown_text(out).split(), out.partition("ended by: ")[2].splitlines()[0]

    whole, _ = ended()
    last = whole[9]
    before = whole[: whole.index(last)]
    assert ended(f"sampling.stop_token_ids=[{last[1:]}]") == (before, f"stop token {last[1:]}")
    assert ended(f"sampling.stop=[{last}]")[1] == f"stop string '{last}'"
    assert ended(f"sampling.stop=[' {last} ']")[0][: len(before)] == before
    assert ended(f"sampling.logit_bias=[[{EOS_ID},1000]]") == ([], "end of text")


# --- two answers


def test_two_answers_side_by_side(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = place.arguments("strategy=baseline", f"beside={LOOKUP}", "measure.warmup=0")
    assert watch.main([QUESTION, *arguments]) == 0
    out = capsys.readouterr().out
    first, second = out.partition("[baseline]\n")[2].split(f"[{LOOKUP}]\n")
    assert first.split() == second.split()[:NEW_TOKENS]
    assert f"baseline: {NEW_TOKENS} tokens in {NEW_TOKENS} target passes" in out
    assert f"{LOOKUP}: {NEW_TOKENS} tokens in " in out
    assert "both texts are the same, token for token" in out
    assert "times are each decoder's own" in out
    arguments = [*arguments, "sampling.temperature=2.0", f'beside="{LOOKUP} seed=1"']


def test_texts_that_part(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    other = "beside=prompt_lookup verifier=token"
    arguments = place.arguments("strategy=baseline", other, "sampling.temperature=1.5", "measure.warmup=0")
    assert watch.main([QUESTION, *arguments]) == 0
    out = capsys.readouterr().out
    first, second = out.partition("[baseline]\n")[2].split("[prompt_lookup verifier=token]\n")
    pairs = list(zip(first.split(), second.split(), strict=False))
    alike = next(number for number, (one, other) in enumerate(pairs) if one != other)
    assert f"the first {alike} tokens of both texts are the same" in out


def test_settings_of_parts_are_the_strategys_and_all_others_hold_for_both(place: Workplace) -> None:
    line = ["strategy=prompt_lookup", "draft_length.max=6", "kv=kv_int8", "seed=3", "beside=baseline"]
    first, second = watch.Question.parse([QUESTION, *place.arguments(*line)]).prepare()
    assert (first.config.draft_length.max, first.config.kv.name, first.config.seed) == (6, "kv_int8", 3)
    assert (second.config.draft_length, second.config.kv.name, second.config.seed) == (None, "dense", 3)
    assert first.requests == second.requests


# --- time


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stopwatch_runs_only_when_told_to() -> None:
    hand = HandClock()
    stopwatch = Stopwatch(hand)
    hand.now_s += 5
    assert stopwatch() == 0
    with stopwatch.running():
        hand.now_s += 2
        assert stopwatch() == 2
    hand.now_s += 5
    with suppress(KeyboardInterrupt), stopwatch.running():
        hand.now_s += 1
        raise KeyboardInterrupt
    assert stopwatch() == 3


def test_times_are_of_steps_alone(place: Workplace) -> None:
    """On a clock by hand: a step takes a second, drawing an hour."""
    hand = HandClock()
    arms = [
        Watched(label, point_of(place, f"strategy={label}", "measure.warmup=0"), hand)
        for label in ("baseline", LOOKUP)
    ]
    for arm in arms:
        steps = arm._steps
        arm._steps = _slowed(steps, hand, 1.0 if arm.label == "baseline" else 1.5)

    def draw() -> None:
        hand.now_s += 3600

    watched.race(arms, draw)
    baseline, lookup = (arm.metrics for arm in arms)
    assert baseline["latency/ttft_ms.p50"] == 1000
    assert baseline["latency/itl_ms.max"] == baseline["latency/tpot_ms.p50"] == 1000
    assert lookup["latency/step_gap_ms.max"] == 1500
    assert lookup["passes/target"] * 1.5 == arms[1].clock()


def _slowed(steps: Iterator[Any], hand: HandClock, seconds: float) -> Iterator[Any]:
    for step in steps:
        hand.now_s += seconds
        yield step


@dataclass
class FakeArm:
    """Takes so many seconds a step, and has so many of them."""

    label: str
    step_s: float
    num_steps: int
    log: list[str]
    end: str | None = None
    now_s: float = field(default=0.0)

    def clock(self) -> float:
        return self.now_s

    def step(self) -> None:
        self.now_s += self.step_s
        self.num_steps -= 1
        self.log.append(self.label)
        self.end = None if self.num_steps else "limit"

    def stop(self) -> None:
        self.end = self.end or "interrupt"


def test_the_arm_whose_clock_is_behind_goes_next() -> None:
    log: list[str] = []
    arms: Any = [FakeArm("fast", 1.0, 6, log), FakeArm("slow", 2.5, 4, log)]
    drawn: list[int] = []
    watched.race(arms, lambda: drawn.append(len(log)))
    # At 5 seconds both stand alike: the first goes.
    assert " ".join(log) == "fast slow fast fast slow fast fast fast slow slow"
    assert drawn == list(range(1, 11))
    assert [arm.end for arm in arms] == ["limit", "limit"]


def test_a_warm_up_is_on_request_and_said(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = place.arguments("strategy=baseline", "workload.max_new_tokens=4")
    assert watch.main([QUESTION, *arguments, "measure.warmup=0"]) == 0
    out = capsys.readouterr().out
    assert "\nloads, then answers\n" in out
    assert "not warmed up (measure.warmup=0)" in out
    assert watch.main([QUESTION, *arguments]) == 0
    out = capsys.readouterr().out
    assert "\nloads, warms up, then answers\n" in out
    assert "not warmed up" not in out


# --- interrupts and failures


def test_an_interrupt_leaves_the_answer_so_far(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Watched) -> None:
        if len(self.token_ids) == 5:
            raise KeyboardInterrupt
        real_step(self)

    real_step = Watched.step
    monkeypatch.setattr(Watched, "step", step)
    assert watch.main([QUESTION, *place.arguments("strategy=baseline", "measure.warmup=0")]) == 130
    shown = capsys.readouterr()
    assert len(shown_text(shown.out).split()) == 5
    assert "5 tokens in 5 target passes" in shown.out
    assert "ended by: interrupt\n" in shown.out
    assert shown.err == "interrupted\n"


def test_an_interrupt_while_loading(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watched, "warm_up", interrupted)
    assert watch.main([QUESTION, *place.arguments("strategy=baseline")]) == 130
    shown = capsys.readouterr()
    assert shown.err == "interrupted\n"
    assert "tokens in" not in shown.out


def test_a_fault_shows_the_answer_so_far_and_is_raised(
    place: Workplace, terminal: Callable[..., TerminalFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Watched) -> None:
        if len(self.token_ids) == 5:
            raise ZeroDivisionError("injected")
        real_step(self)

    real_step = Watched.step
    monkeypatch.setattr(Watched, "step", step)
    file = terminal()
    with pytest.raises(ZeroDivisionError):
        watch.main([QUESTION, *place.arguments("strategy=baseline", "measure.warmup=0")])
    everything = file.getvalue()
    assert "\x1b[?25h" in everything  # the cursor is back
    assert len(CONTROL.sub("", everything.rpartition("\x1b[2K")[2]).split()) == 5


# --- bad input: one line, exit status 2

BAD_INPUT: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "nothing": ([], ("no question", "in quotes")),
    "settings only": (["strategy=specdec"], ("no question",)),
    "a blank question": (["  "], ("no question",)),
    "words without quotes": (["Why", "so?"], ("2 questions", "in quotes")),
    "a sweep": (["-m", QUESTION], ("unknown option -m",)),
    "unknown strategy": ([QUESTION, "strategy=specdek"], ("'specdek'", "baseline", "prompt_lookup")),
    "unknown strategy beside": ([QUESTION, "beside=specdek"], ("arm 'specdek'", "baseline", "prompt_lookup")),
    "two strategies": ([QUESTION, "strategy=baseline", "strategy=int8"], ("strategy=... is given twice",)),
    "an arm of settings": ([QUESTION, "beside=seed=1"], ("arm 'seed=1'", "preset")),
    "a shared setting beside": ([QUESTION, "beside=baseline seed=1"], ("sets seed",)),
    "unknown key": ([QUESTION, "max_new_tokens=3"], ("max_new_tokens", "workload.max_new_tokens")),
    "unknown key beside": (
        [QUESTION, "beside=specdec draft_lenght.max=3"],
        ("did you mean 'draft_length'?",),
    ),
    "a part that it has not": ([QUESTION, "strategy=baseline", "draft_length.max=3"], ("draft_length",)),
    "another workload": ([QUESTION, "workload=jsonl"], ("workload=jsonl", "no effect")),
    "a batch": ([QUESTION, "batch_size=4"], ("batch_size=4", "no effect")),
    "repeats": ([QUESTION, "measure.repeats=4"], ("measure.repeats=4", "no effect")),
    "an experiment": ([QUESTION, "+experiment=quant_grid"], ("+experiment=quant_grid", "no effect")),
    "no new tokens": ([QUESTION, "workload.max_new_tokens=0"], ("workload.max_new_tokens=0",)),
    "too long a question": (
        [words([1] * CONTEXT_LENGTH)],
        (f"{CONTEXT_LENGTH} tokens + {NEW_TOKENS} new ones", str(CONTEXT_LENGTH)),
    ),
    "too many threads": ([QUESTION, "threads=4096"], ("threads=4096",)),
    "no model": ([QUESTION, "model.target=/nowhere"], ("model.target=/nowhere",)),
    "weights that don't fit": (
        [QUESTION, "strategy=baseline", "weights=bnb_nf4", "weights.keep=[nothing]"],
        ("weights=bnb_nf4",),
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(place: Workplace, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, mentions = BAD_INPUT[case]
    assert watch.main(place.arguments(*arguments)) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    for mention in mentions:
        assert mention in line
    assert "tokens in" not in shown.out


def test_a_question_may_hold_an_equals_sign() -> None:
    question = watch.Question.parse(["What is x if 2x=8?", "seed=1", "~drafter.weights", "-- or not"][:3])
    assert (question.text, question.shared_overrides) == ("What is x if 2x=8?", ("seed=1",))
    assert watch.Question.parse(["-1 + 3 = ?"]).text == "-1 + 3 = ?"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_usage_and_an_example(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert watch.main([flag]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m experiments.watch")
    question = watch.Question.parse(shlex.split(shown.partition("example: ")[2])[3:])
    assert (question.text, question.labels) == (
        "Why is the sky blue?",
        ["specdec", "prompt_lookup draft_length.max=6"],
    )


# --- in a process of its own


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(place: Workplace) -> None:
    arguments = place.arguments("strategy=no_cache", "workload.max_new_tokens=110", "measure.warmup=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.watch", QUESTION, *arguments],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("loads"):
                break
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, shown) == (130, "interrupted\n")


@pytest.mark.slow
def test_the_bundled_model_answers_alike_with_and_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    question = "Write one sentence in French about cafés, then one in Japanese."
    settings = ["dtype=fp32", "threads=1", "workload.max_new_tokens=48", "measure.warmup=0"]
    assert watch.main([question, "strategy=specdec", "beside=baseline", *settings]) == 0
    out = capsys.readouterr().out
    assert "both texts are the same, token for token" in out
    (point,) = watch.Question.parse([question, "strategy=baseline", *settings]).prepare()
    (answer,) = _answers(point)
    text = point.pool.tokenizer.decode(answer, skip_special_tokens=True)
    assert out.count(f"]\n{text}\n") == 2


def _answers(point: Any) -> list[list[int]]:
    decoder = point.entry(point.arms.strategy).build()
    return [[token for step in decoder.generate(point.requests) for token in step.committed[0]]]
