"""Every mismatch is graded, and no fault passes for a near tie: honest ties and planted faults, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_clock import Clock
from toy_engine import LawOf, ToyRunner, build_decoder, model_drafter, requests_for, toy_drafter
from toy_models import random_prompts, tiny_model
from transformers import PreTrainedModel

from experiments import equivalence
from experiments.equivalence import DIVERGED, EXACT, NEAR_TIE, Comparison, first_mismatch
from experiments.measure import measure
from experiments.trace import timelines
from specdec.decoding.base import Decoder, DecodingParts
from specdec.decoding.no_cache import NoCacheDecoder
from specdec.draws import BlockDraws
from specdec.progress import StopTokens
from specdec.runner import ModelRunner, Runner
from specdec.types import DraftProposal, Law, Request, Verification
from specdec.verifiers.base import Verifier

pytestmark = pytest.mark.usefixtures("one_thread")


def graded(
    strategy: Decoder,
    make_runner: Callable[[], Runner],
    block: Sequence[Request],
    stop_ids: Sequence[int] = (),
) -> list[Comparison]:
    """The strategy against a twin, as a run does it: twin and replays get runners from one factory."""
    num_slots = strategy.num_slots

    def fresh_parts() -> DecodingParts:
        plain = build_decoder(make_runner(), num_slots=num_slots)
        return DecodingParts(plain.runner, plain.sampler, plain.draws, StopTokens(stop_ids), num_slots)

    twin = build_decoder(make_runner(), num_slots=num_slots, stop_ids=stop_ids)
    traces = measure({"strategy": strategy, "twin": twin}, [block], warmup=0, clock=Clock())
    found = {trace.arm: trace for trace in traces}
    answers = {arm: {t.request_id: t.token_ids for t in timelines(trace)} for arm, trace in found.items()}
    return equivalence.compare_block(
        found["strategy"], block, answers["strategy"], answers["twin"], fresh_parts
    )


# --- real models in float64: exact, or a fault


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def drafts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Copies of the target with some noise in the weights: often right, often wrong."""
    generator = torch.Generator().manual_seed(0)
    copies = [copy.deepcopy(model) for _ in range(3)]
    with torch.no_grad():
        for parameter in (p for one in copies for p in one.parameters()):
            parameter.add_(0.06 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return copies


class KeepsOneTooMany(ModelRunner):
    """A fault: of the rejected draft tokens, the first stays in the cache."""

    def commit(self, lengths: Sequence[int]) -> None:
        held = self.lengths
        super().commit([min(length + 1, held[slot]) for slot, length in enumerate(lengths)])


class ShiftsPositions(ModelRunner):
    """A fault: positions go on where the rejected tokens ended."""

    def commit(self, lengths: Sequence[int]) -> None:
        held = self.lengths
        super().commit(held[: len(lengths)])


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize(
    ("runner", "grade"),
    [(ModelRunner, EXACT), (KeepsOneTooMany, DIVERGED), (ShiftsPositions, DIVERGED)],
    ids=["right", "keeps one too many", "shifts positions"],
)
def test_a_faulty_rollback_never_passes_for_a_near_tie(
    model: PreTrainedModel,
    drafts: list[PreTrainedModel],
    runner: type[ModelRunner],
    grade: str,
    num_slots: int,
) -> None:
    """The fault is in the engine, so replays have it too and reproduce the wrong text."""
    capacity = 128
    grades = []
    for seed, draft in enumerate(drafts):
        block = requests_for(random_prompts([5, 8, 11][:num_slots], seed=seed), 20)
        strategy = build_decoder(
            runner(model, num_slots, capacity),
            num_slots=num_slots,
            drafter=model_drafter(draft, num_slots, capacity),
        )
        grades += [c.grade for c in graded(strategy, lambda: runner(model, num_slots, capacity), block)]
    assert grades == [grade] * len(grades)


class AcceptsAll(Verifier):
    """A fault: whatever was drafted stands."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        lengths = torch.tensor(proposal.lengths)
        behind = draws.target(target.take(lengths), lengths)
        return Verification(proposal.lengths, tuple(behind.tolist()))


def test_a_verifier_that_accepts_all_is_caught(model: PreTrainedModel, drafts: list[PreTrainedModel]) -> None:
    block = requests_for(random_prompts([5, 8, 11]), 20)
    strategy = build_decoder(
        ModelRunner(model, 3, 64),
        num_slots=3,
        drafter=model_drafter(drafts[0], 3, 64),
        verifier=AcceptsAll(),
    )
    found = graded(strategy, lambda: ModelRunner(model, 3, 64), block)
    assert [comparison.grade for comparison in found] == [DIVERGED] * 3
    for comparison in found:
        assert comparison.position is not None
        assert comparison.token_id != comparison.twin_token_id
        assert comparison.margin is not None
        assert comparison.margin > 1e-6


def test_without_the_cache_the_text_is_the_same(model: PreTrainedModel) -> None:
    block = requests_for(random_prompts([5, 8]), 12)
    plain = build_decoder(ModelRunner(model, 2, 32), num_slots=2)
    parts = DecodingParts(plain.runner, plain.sampler, plain.draws, StopTokens(), 2)
    found = graded(NoCacheDecoder(parts), lambda: ModelRunner(model, 2, 32), block)
    assert found == [Comparison(0, EXACT), Comparison(1, EXACT)]


# --- near ties: a toy whose logits depend on the width of the pass

VOCAB_SIZE = 8
SINGLE, WIDE = 5, 6  # the tied tokens: what a pass of one token says, and what a wider one says
TIED_LENGTH = 7  # of the text before them
PROMPT = [0, 1, 2]


def counting_with_a_tie(gap: float) -> LawOf:
    """Text position n holds token n % 4, but texts that begin with 0 have a tie of log-probability `gap` once."""

    def law(text: Sequence[int]) -> list[float]:
        if len(text) == TIED_LENGTH and text[0] == 0:
            weights = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
            weights[SINGLE], weights[WIDE] = gap, 0.0
            weights[[t for t in range(VOCAB_SIZE) if t not in (SINGLE, WIDE)]] = -20.0
            return torch.softmax(weights, 0).tolist()
        return [float(token == len(text) % 4) for token in range(VOCAB_SIZE)]

    return law


class WidthRunner(ToyRunner):
    """In passes of more than one token the logit of WIDE is larger by `tilt`; prompts are read with `prefill_tilt`."""

    def __init__(self, law_of: LawOf, num_slots: int, tilt: float, prefill_tilt: float) -> None:
        super().__init__(law_of, VOCAB_SIZE, num_slots)
        self.tilt, self.prefill_tilt = tilt, prefill_tilt
        self._now = 0.0

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        self._now = self.prefill_tilt
        return super().prefill(prompts, slots)

    def _append(self, verb: str, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        self._now = self.tilt if token_ids.shape[1] > 1 else 0.0
        return super()._append(verb, token_ids, counts)

    def _logits(self, text: Sequence[int]) -> Tensor:
        logits = super()._logits(text)
        if len(text) == TIED_LENGTH and text[0] == 0:
            logits[WIDE] += self._now
        return logits


def tied(
    gap: float,
    tilt: float,
    prefill_tilt: float,
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    new_tokens: int = 12,
) -> list[Comparison]:
    """Speculation with a draft that is always right but at the tie, where it drafts SINGLE."""

    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(gap), len(prompts), tilt, prefill_tilt)

    strategy = build_decoder(
        make_runner(),
        num_slots=len(prompts),
        drafter=toy_drafter(counting_with_a_tie(gap), VOCAB_SIZE, len(prompts)),
        draft_length=3,
    )
    return graded(strategy, make_runner, requests_for(prompts, new_tokens))


def test_what_only_the_shape_of_the_pass_decides_is_a_near_tie() -> None:
    (found,) = tied(gap=1e-3, tilt=2e-3, prefill_tilt=2e-3)
    assert found.grade == NEAR_TIE
    assert (found.position, found.token_id, found.twin_token_id) == (TIED_LENGTH - len(PROMPT), WIDE, SINGLE)
    assert found.margin == pytest.approx(1e-3)
    assert found.rounding == pytest.approx(2e-3)


def test_a_tie_that_no_shape_breaks_is_exact() -> None:
    assert tied(gap=1e-3, tilt=0.5e-3, prefill_tilt=0.5e-3) == [Comparison(0, EXACT)]


def test_only_the_tied_row_of_a_batch_is_graded_so() -> None:
    found = tied(gap=1e-3, tilt=2e-3, prefill_tilt=2e-3, prompts=[[3, 1, 2], PROMPT, [3, 1]])
    assert [comparison.grade for comparison in found] == [EXACT, NEAR_TIE, EXACT]


def test_a_wide_pass_that_is_wrong_by_more_than_rounding_is_a_fault() -> None:
    """The replay says what the run said; but read in one pass, the text gives the logits of single tokens."""
    (found,) = tied(gap=1.0, tilt=2.0, prefill_tilt=0.0)
    assert found.grade == DIVERGED
    assert (found.token_id, found.twin_token_id) == (WIDE, SINGLE)
    assert (found.margin, found.rounding) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))


def test_two_tokens_further_apart_than_rounding_are_no_tie() -> None:
    (found,) = tied(gap=1.0, tilt=2.0, prefill_tilt=0.4)
    assert found.grade == DIVERGED
    assert found.rounding == pytest.approx(0.4)


def test_a_wrong_token_at_a_real_tie_is_a_fault_where_no_pass_says_so() -> None:
    """The two tokens are within rounding, but the verify pass itself says SINGLE: someone else wrote WIDE."""

    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(1e-3), 1, 0.0, 2e-3)

    strategy = build_decoder(
        make_runner(),
        num_slots=1,
        drafter=toy_drafter(counting_with_a_tie(-1e-3), VOCAB_SIZE, 1),
        verifier=AcceptsAll(),
    )
    (found,) = graded(strategy, make_runner, requests_for([PROMPT], 12))
    assert (found.token_id, found.twin_token_id) == (WIDE, SINGLE)
    assert (found.margin, found.rounding) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert found.grade == DIVERGED


def test_a_tie_is_a_near_tie_without_the_cache_too() -> None:
    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(1e-3), 1, 0.0, 2e-3)

    plain = build_decoder(make_runner(), num_slots=1)
    parts = DecodingParts(plain.runner, plain.sampler, plain.draws, StopTokens(), 1)
    (found,) = graded(NoCacheDecoder(parts), make_runner, requests_for([PROMPT], 8))
    assert found.grade == NEAR_TIE


def test_a_text_that_ends_elsewhere_is_a_fault() -> None:
    """The strategy knows no stop token; its twin stops at token 2."""

    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(1e-3), 1, 0.0, 0.0)

    law = counting_with_a_tie(1e-3)
    strategy = build_decoder(make_runner(), num_slots=1, drafter=toy_drafter(law, VOCAB_SIZE, 1))
    (found,) = graded(strategy, make_runner, requests_for([[3, 1]], 8), stop_ids=[2])
    assert found == Comparison(0, DIVERGED, 1, 3, None)


def test_a_first_token_that_differs_is_a_fault() -> None:
    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(1e-3), 1, 0.0, 0.0)

    strategy = build_decoder(WidthRunner(lambda text: [0, 0, 0, 0, 1, 0, 0, 0], 1, 0.0, 0.0), num_slots=1)
    (found,) = graded(strategy, make_runner, requests_for([[3, 1]], 4))
    assert (found.grade, found.position, found.token_id, found.twin_token_id) == (DIVERGED, 0, 4, 2)


def test_repeats_of_the_same_passes_are_replayed_once() -> None:
    def make_runner() -> WidthRunner:
        return WidthRunner(counting_with_a_tie(1e-3), 1, 2e-3, 2e-3)

    def fresh_parts() -> DecodingParts:
        built.append(1)
        plain = build_decoder(make_runner(), num_slots=1)
        return DecodingParts(plain.runner, plain.sampler, plain.draws, StopTokens(), 1)

    built: list[int] = []
    law = counting_with_a_tie(1e-3)
    arms = {
        "strategy": build_decoder(make_runner(), num_slots=1, drafter=toy_drafter(law, VOCAB_SIZE, 1)),
        "twin": build_decoder(make_runner(), num_slots=1),
    }
    blocks = [requests_for([PROMPT], 8)]
    found = {}
    for repeats in (1, 3):
        built.clear()
        traces = measure(arms, blocks, warmup=0, clock=Clock(), repeats=repeats)
        ours, twins = ([trace for trace in traces if trace.arm == arm] for arm in arms)
        found[repeats] = equivalence.compare_traces(ours, twins, blocks, fresh_parts)
        assert len(built) == 3
    assert [one.grade for one in found[3]] == [NEAR_TIE] * 3
    assert found[3] == found[1] * 3
    # Another arm of the same twin needs its own passes only.
    memory: equivalence.Memory = {}
    equivalence.compare_traces(ours, twins, blocks, fresh_parts, memory)
    built.clear()
    assert equivalence.compare_traces(ours, twins, blocks, fresh_parts, memory) == found[3]
    assert len(built) == 1
    ours[2].passes[1] = replace(ours[2].passes[1], counts=(1,))  # another shape
    built.clear()
    assert len(equivalence.compare_traces(ours, twins, blocks, fresh_parts)) == 3
    assert len(built) == 3 + 1


# --- pure functions


@pytest.mark.parametrize(
    ("tokens", "twin", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2, 3], [1], 1), ([], [], None)],
)
def test_first_mismatch(tokens: list[int], twin: list[int], expected: int | None) -> None:
    assert first_mismatch(tokens, twin) == expected


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ([EXACT, EXACT], "exact"),
        ([EXACT, NEAR_TIE], "near_tie"),
        ([NEAR_TIE, DIVERGED, EXACT], "diverged"),
        ([], "n/a"),
    ],
)
def test_the_worst_grade_counts(grades: list[str], expected: str) -> None:
    assert equivalence.overall([Comparison(n, grade) for n, grade in enumerate(grades)]) == expected


def test_quality_counts_the_grades() -> None:
    found = equivalence.quality([Comparison(n, g) for n, g in enumerate([EXACT, EXACT, NEAR_TIE, DIVERGED])])
    assert found == {"quality/exact_match_pct": 50.0, "quality/near_tie_n": 1, "quality/diverged_n": 1}
    assert equivalence.quality([]) == {}
