"""What a person reads of fidelity: two rows of the table, a line per text that was read, predicted acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.arm_fidelity import ON_CORPUS, ON_TEXTS, ArmFidelity
from experiments.fidelity import Fidelity

MISSING = "-"
SOURCES = {ON_TEXTS: "plain's texts", ON_CORPUS: "the corpus"}


def rows(fidelities: Sequence[ArmFidelity | None]) -> list[list[str]]:
    """A cell per arm, each figure beside the floor; on the reference's texts, else on the corpus."""
    found: list[list[str]] = []
    for prefix, source in SOURCES.items():
        pairs = [None if one is None else one.beside_floor(prefix) for one in fidelities]
        if any(pairs) and not found:
            where = "" if prefix == ON_TEXTS else f" on {source}"
            found = [
                [f"KL to plain{where}, mean (floor)", *(_cell(pair, _kl_mean) for pair in pairs)],
                [f"top token as plain's{where} (floor)", *(_cell(pair, _top) for pair in pairs)],
            ]
    return found


def lines(fidelity: ArmFidelity | None, metrics: Mapping[str, float], prefix: str = "") -> Iterator[str]:
    """All figures of an arm, each beside the floor; its draft model's acceptance beside the measured one."""
    if fidelity is None:
        return
    for name, source in SOURCES.items():
        pair = fidelity.beside_floor(name)
        if pair is not None:
            yield f"{prefix}fidelity on {source}: {_figures(*pair)}"
    if fidelity.acceptance is not None:
        predicted = fidelity.acceptance
        measured = metrics.get("spec/acceptance_rate_judged")
        seen = "" if measured is None else f", measured {measured:.2f} of the draft tokens that were judged"
        yield f"{prefix}predicted acceptance {predicted.law:.2f} (law), {predicted.greedy:.2f} (argmax){seen}"


def headline(fidelity: ArmFidelity | None) -> tuple[str, str] | None:
    """Mean KL with its floor, and top-1 agreement; None for an arm that keeps the laws."""
    for name in SOURCES:
        pair = None if fidelity is None else fidelity.beside_floor(name)
        if pair is not None:
            return _cell(pair, _kl_mean), _top(pair[0])
    return None


def clause(fidelity: ArmFidelity | None) -> str | None:
    """For a verdict's line; None for an arm that keeps the laws."""
    figures = headline(fidelity)
    return None if figures is None else f"KL to plain {figures[0]}, top token as plain's {figures[1]}"


def _figures(arm: Fidelity, floor: Fidelity) -> str:
    tail = "max" if arm.kl_p99 is None else "p99"
    kl, kl_floor = (
        (one.kl_mean, one.kl_median, one.kl_max if one.kl_p99 is None else one.kl_p99) for one in (arm, floor)
    )
    return (
        f"KL {kl[0]:.2g} mean, {kl[1]:.2g} median, {kl[2]:.2g} {tail} "
        f"(floor {', '.join(f'{value:.2g}' for value in kl_floor)}); "
        f"top token as plain's {_top(arm)} ({_top(floor)}); {arm.flips_n} flips ({floor.flips_n}); "
        f"perplexity {arm.ppl_ratio:.3f}x ({floor.ppl_ratio:.3f}x); "
        f"expected acceptance {arm.expected_acceptance:.3f} ({floor.expected_acceptance:.3f}); "
        f"{arm.num_positions} positions"
    )


def _cell(pair: tuple[Fidelity, Fidelity] | None, form: Callable[[Fidelity], str]) -> str:
    return MISSING if pair is None else f"{form(pair[0])} ({form(pair[1])})"


def _kl_mean(one: Fidelity) -> str:
    return f"{one.kl_mean:.2g}"


def _top(one: Fidelity) -> str:
    return f"{one.top1_agreement_pct:.1f} %"
