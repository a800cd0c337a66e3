"""python -m experiments.watch "a question" strategy=specdec 'beside=prompt_lookup draft_length.max=6'

Streams an answer with its accepted, recovered and bonus tokens coloured, and the passes counted. For the eye: nothing
is logged. The models, the chat template and the engine are those of experiments.run; so are the settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from experiments import command_line, plugins
from experiments.bench import UnfitPartsError
from experiments.command_line import BAD_INPUT, BAD_INPUT_STATUS, INTERRUPTED_STATUS, explain_arm
from experiments.comparison import ArmError, ArmSpec
from experiments.config import compose_run
from experiments.models import LoadedModels
from experiments.point import PreparedPoint, prepare
from experiments.terminal import print_lines
from experiments.watch_view import setting_lines, summary_lines, watching
from experiments.watched import Watched, race
from experiments.workloads.base import Prompt, WorkloadContext, WorkloadOptions

USAGE = """usage: python -m experiments.watch "QUESTION" [strategy=ARM] [beside=ARM] [SETTING=VALUE ...]

An ARM is a strategy preset, with overrides where wanted: 'beside=prompt_lookup draft_length.max=6'. `beside` shows a
second answer to the same question; the two compute in turn, each on a clock of its own. A SETTING is one of
experiments.run, such as workload.max_new_tokens=200 sampling.temperature=0.7 threads=1. Those of weights, kv, decoding,
drafter, verifier and draft_length are the strategy's, all others hold for both arms. Nothing is logged.

Colours need a terminal; elsewhere the text comes bare, and the last lines count its tokens by kind. Control characters
are shown as pictures; special tokens, and the stop that ends an answer, are not shown.

example: python -m experiments.watch "Why is the sky blue?" strategy=specdec 'beside=prompt_lookup draft_length.max=6'
"""

EXAMPLE = '"Why is the sky blue?" strategy=specdec'
DEFAULT_STRATEGY = "specdec"
# What has no effect on a single answer that is not logged, but for some of its parts.
WITHOUT_EFFECT = ("workload", "measure", "batch_size", "fidelity", "study", "experiment")
WITH_EFFECT = ("workload.max_new_tokens", "measure.warmup")
# A key has no blanks, so that a question may hold an equals sign.
_SETTING = re.compile(r"[+~]*[\w.@/]+=|~[\w.@/]+$")


@dataclass
class QuestionWorkload(WorkloadOptions):
    """The one prompt that was asked."""

    text: str = ""

    def load(self, context: WorkloadContext) -> list[Prompt]:
        return [Prompt("question", "question", text=self.text)]


@dataclass(frozen=True)
class Question:
    """What a command line asks for. `arms` are one or two, the first with the part settings of the whole line."""

    text: str
    arms: tuple[ArmSpec, ...]
    shared_overrides: tuple[str, ...]

    @staticmethod
    def parse(arguments: Sequence[str]) -> Question:
        """Raises ValueError for a line that asks nothing, or sets what has no effect here."""
        texts = [argument for argument in arguments if not _SETTING.match(argument)]
        options = [text for text in texts if text.startswith("-") and not re.search(r"\s", text)]
        if options:
            raise ValueError(f"unknown option {options[0]}: expected a question and settings")
        if len(texts) > 1:
            raise ValueError(f"{len(texts)} questions: expected one, in quotes, as in {EXAMPLE}")
        if not texts or not texts[0].strip():
            raise ValueError(f"no question: expected one, in quotes, as in {EXAMPLE}")
        arms: dict[str, list[str]] = {"strategy": [], "beside": []}
        own: list[str] = []
        shared: list[str] = []
        for setting in (argument for argument in arguments if _SETTING.match(argument)):
            name = setting.lstrip("+~").partition("=")[0]
            group = re.split("[.@]", name)[0]
            if name in arms:
                arms[name].append(_unquoted(setting.partition("=")[2]))
            elif group in WITHOUT_EFFECT and name not in WITH_EFFECT:
                raise ValueError(f"{setting}: has no effect on one answer that is watched and not logged")
            else:
                (own if group in plugins.GROUPS and group != "workload" else shared).append(setting)
        for name, values in arms.items():
            if len(values) > 1:
                raise ValueError(f"{name}=... is given twice: expected it once")
        strategy = ArmSpec.parse(*arms["strategy"] or [DEFAULT_STRATEGY])
        beside = [ArmSpec.parse(text) for text in arms["beside"]]
        strategy = replace(strategy, overrides=(*strategy.overrides, *own))
        for spec in (strategy, *beside):
            spec.check_settings()
        return Question(texts[0], (strategy, *beside), tuple(shared))

    @property
    def labels(self) -> list[str]:
        return [spec.label for spec in self.arms]

    def prepare(self) -> list[PreparedPoint]:
        """The arms, checked; nothing heavy is loaded yet. Raises ArmError where one of two arms does not check out."""
        loaded = LoadedModels()
        points = []
        for spec in self.arms:
            # Fidelity is not measured, so no corpus is read.
            overrides = (
                *self.shared_overrides,
                "fidelity.corpus=none",
                f"strategy={spec.preset}",
                *spec.overrides,
            )
            try:
                config = compose_run(overrides)
                workload = QuestionWorkload(1, config.workload.max_new_tokens, self.text)
                points.append(prepare(replace(config, workload=workload), loaded))
            except Exception as error:
                if not points:
                    raise
                raise ArmError(spec.label, error) from error
        return points


def _unquoted(value: str) -> str:
    """As experiments.compare takes arms, with quotes for Hydra within those for the shell."""
    quoted = re.fullmatch(r"""(["'])(.*)\1""", value)
    return quoted[2] if quoted else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer and show it; the exit status is 0 if the answers came to their ends."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    return command_line.guarded(lambda: _watch(arguments))


def _watch(arguments: Sequence[str]) -> int:
    arms: list[Watched] = []
    try:
        try:
            question = Question.parse(arguments)
            points = question.prepare()
        except BAD_INPUT as error:
            return _refuse(explain_arm(error))
        print_lines(setting_lines(question.labels, points))
        torch.set_num_threads(points[0].config.threads or 1)  # before kernels are chosen by their times
        try:
            arms = [Watched(label, point) for label, point in zip(question.labels, points, strict=True)]
        except UnfitPartsError as error:
            return _refuse(str(error))
        with watching(arms) as on_step:
            race(arms, on_step)
    except KeyboardInterrupt:
        print_lines(summary_lines(arms))
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    print_lines(summary_lines(arms))
    return 0


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return BAD_INPUT_STATUS


if __name__ == "__main__":
    sys.exit(main())
