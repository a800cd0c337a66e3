"""python -m experiments.compare baseline=baseline 'candidates=["prompt_lookup draft_length.max=6", specdec]'

Arms are a strategy preset plus overrides. They decode the same prompts in turn, beside the baseline a second time;
the answer is a verdict for each candidate, with an interval. Whatever else stands on the command line holds for all
arms: `workload.limit=6 measure.repeats=3 threads=1`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from experiments import command_line
from experiments.bench import UnfitPartsError
from experiments.command_line import BAD_INPUT, BAD_INPUT_STATUS, FAILURE_STATUS, explain_arm
from experiments.comparison import prepare_comparison
from experiments.comparison_run import run_comparison

USAGE = """usage: python -m experiments.compare baseline=ARM 'candidates=[ARM, "ARM", ...]' [SETTING=VALUE ...]

An ARM is a strategy preset, with overrides where wanted and then in double quotes: "prompt_lookup draft_length.max=6",
as in 'baseline="baseline weights=bnb_nf4"'. The default baseline is `baseline`. A SETTING holds for all arms; they are
those of experiments.run: workload.limit=6 measure.repeats=3 threads=1. --help there lists their choices.

example: python -m experiments.compare baseline=baseline 'candidates=["prompt_lookup draft_length.max=6", specdec]'
"""

# What has words in it has quotes of its own, for Hydra to read, within those that a shell takes.
EXAMPLES = {
    "baseline": "'baseline=\"prompt_lookup draft_length.max=4\"'",
    "candidates": "'candidates=[\"prompt_lookup draft_length.max=6\", specdec]'",
}


@dataclass(frozen=True)
class Question:
    """What a command line asks for."""

    baseline: str
    candidates: tuple[str, ...]
    shared_overrides: tuple[str, ...]

    @staticmethod
    def parse(arguments: Sequence[str]) -> Question:
        """Raises ValueError for a line that asks for nothing that can be compared."""
        given: dict[str, str] = {}
        shared = []
        for argument in arguments:
            name, equals, _ = argument.partition("=")
            if name in EXAMPLES and equals:
                if name in given:
                    raise ValueError(f"{name}=... is given twice: expected it once, as in {EXAMPLES[name]}")
                given[name] = argument
            elif argument.startswith("-"):
                raise ValueError(
                    f"unknown option {argument}: expected baseline=..., candidates=... and settings"
                )
            else:
                shared.append(argument)
        if "candidates" not in given:
            raise ValueError(f"no candidates: expected a list of arms, as in {EXAMPLES['candidates']}")
        baseline = _value(given.get("baseline", "baseline=baseline"))
        candidates = _value(given["candidates"])
        if not isinstance(baseline, str):
            raise _unreadable(given["baseline"])
        if isinstance(candidates, str):
            candidates = [candidates]
        if (
            not isinstance(candidates, list)
            or not candidates
            or not all(isinstance(c, str) for c in candidates)
        ):
            raise _unreadable(given["candidates"])
        return Question(baseline, tuple(candidates), tuple(shared))


def _value(argument: str) -> Any:
    try:
        (override,) = OverridesParser.create().parse_overrides([argument])
    except HydraException as error:
        raise _unreadable(argument) from error
    return None if override.is_sweep_override() else override.value()


def _unreadable(argument: str) -> ValueError:
    name, _, value = argument.partition("=")
    what = "an arm" if name == "baseline" else "a list of arms"
    return ValueError(f"{name}={value}: expected {what}, as in {EXAMPLES[name]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit status is 0 only if all arms were measured and logged."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    return command_line.guarded(lambda: _compare(arguments))


def _compare(arguments: Sequence[str]) -> int:
    started_s = time.perf_counter()
    try:
        question = Question.parse(arguments)
        comparison = prepare_comparison(question.baseline, question.candidates, question.shared_overrides)
    except BAD_INPUT as error:
        print(f"error: {explain_arm(error)}", file=sys.stderr)
        return BAD_INPUT_STATUS
    try:
        result = run_comparison(comparison, "compare", started_s)
    except UnfitPartsError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    return FAILURE_STATUS if result.measured.failures else 0


if __name__ == "__main__":
    sys.exit(main())
