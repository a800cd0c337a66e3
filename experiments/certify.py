"""python -m experiments.certify [verifier=token] [pairs=FILE]

Shows by exact enumeration that verifiers leave the target's law as it is, that planted faults are seen, and that texts
sampled by the whole decoder have that law. Prints one JSON object last; the exit status is 0 only if all of it holds.

  verifier=NAME   one verifier (default: all); `match` has no draft law of its own to be exact for a single block:
                  its output is the baseline's sample itself, and is checked as such by the same enumeration
  pairs=FILE      JSON lines {"target": [[..], ..], "draft": [[..], ..]}, K + 1 target laws and K draft laws each;
                  besides the built-in ones
  draws=N         texts of the sampling test (default 20000)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import plugins
from experiments.certificate import (
    ALARM_RATE,
    BUILT_IN_PAIRS,
    NUM_DRAWS,
    check_faults,
    check_sampling,
    check_verifier,
    read_pairs,
)
from experiments.command_line import BAD_INPUT_STATUS, FAILURE_STATUS

ERR = Console(stderr=True, highlight=False)
SETTINGS = ("verifier", "pairs", "draws", "plugin")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        settings = _parse(arguments)
        plugins.register_all(settings.get("plugin"))
        pairs = [*BUILT_IN_PAIRS, *(read_pairs(Path(settings["pairs"])) if "pairs" in settings else ())]
        names = [settings["verifier"]] if "verifier" in settings else plugins.known("verifier")
        verifiers = {name: plugins.default_options("verifier", name) for name in names}
        num_draws = _positive(settings.get("draws", str(NUM_DRAWS)))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT_STATUS
    found = certify({name: options.build() for name, options in verifiers.items()}, pairs, num_draws)
    holds = (
        all(found["verifiers"][name]["exact"] for name, options in verifiers.items() if options.lossless)
        and all(fault["caught"] for fault in found["planted_faults"].values())
        and found["end_to_end"]["p_value"] > ALARM_RATE
    )
    print(json.dumps(found))
    return 0 if holds else FAILURE_STATUS


def certify(verifiers: dict[str, Any], pairs: Sequence[Any], num_draws: int) -> dict[str, Any]:
    """The certificate as JSON values; the sampling test is of the verifier with the smallest p-value."""
    laws = {name: check_verifier(verifier, pairs) for name, verifier in verifiers.items()}
    for name, check in laws.items():
        ERR.print(f"{name}: total variation {check.max_tv:.1e} at most, over {check.cases} cases")
    faults = check_faults()
    for name, check in faults.items():
        ERR.print(f"planted fault {name}: {check.max_tv:.2e}")
    samples = [check_sampling(verifier, num_draws) for verifier in verifiers.values()]
    worst = min(samples, key=lambda sample: sample.p_value)
    return {
        "verifiers": {
            name: {"exact": check.is_exact, "max_tv": check.max_tv, "cases": check.cases}
            for name, check in laws.items()
        },
        "planted_faults": {
            name: {"caught": not check.is_exact, "max_tv": check.max_tv} for name, check in faults.items()
        },
        "end_to_end": {
            "p_value": worst.p_value,
            "draws": worst.draws,
            "power_for_tv_0.05": worst.power,
            "alarm_rate": ALARM_RATE,
        },
    }


def _parse(arguments: Sequence[str]) -> dict[str, str]:
    settings = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name not in SETTINGS or not separator or not value:
            raise ValueError(f"{argument!r}: expected {', '.join(f'{known}=...' for known in SETTINGS)}")
        settings[name] = value
    return settings


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"draws={text}: expected a number, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
