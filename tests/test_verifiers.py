"""Output laws by exact enumeration: of one verification, and of the whole decoder over several blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from toy_engine import CPU, ToyRunner, build_decoder, collect, requests_for, toy_drafter

from specdec.draft_length.base import DraftLength
from specdec.draft_length.confidence import ConfidenceDraftLength
from specdec.drafters.base import Drafter
from specdec.draws import BlockDraws, Draws, KeyedDraws, Keys, Purpose
from specdec.enumeration import law_of, outcomes, total_variation
from specdec.progress import Row
from specdec.types import DraftProposal, GoOn, Law, Verification
from specdec.verifiers.base import Verifier
from specdec.verifiers.block import BlockOptions
from specdec.verifiers.match import MatchOptions
from specdec.verifiers.token import TokenOptions, TokenVerifier

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-12
VERIFIERS = {"token": TokenOptions().build, "block": BlockOptions().build, "match": MatchOptions().build}

# Pairs of (target laws for K + 1 positions, draft laws for K positions), vocabulary 3.
# Token excesses of target over draft are unequal, and one token is far below: a wrong residual shows.
TARGET = [[0.40, 0.25, 0.35], [0.20, 0.50, 0.30], [0.55, 0.15, 0.30], [0.10, 0.60, 0.30]]
DRAFT = [[0.80, 0.15, 0.05], [0.60, 0.10, 0.30], [0.25, 0.70, 0.05]]
PAIRS = {
    "unequal_excess": (TARGET, DRAFT),
    "equal_laws": (TARGET, TARGET[:3]),
    "disjoint_support": (
        [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]],
        [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]],
    ),
    "target_zero_where_draft_likes": (
        [[0.0, 0.7, 0.3], [0.0, 0.2, 0.8], [0.3, 0.3, 0.4]],
        [[0.9, 0.05, 0.05], [0.5, 0.3, 0.2]],
    ),
    "draft_never_says_a_likely_token": (TARGET, [[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]),
    "nearly_certain": (
        [[1 - 2e-9, 1e-9, 1e-9], [1e-9, 1 - 2e-9, 1e-9]],
        [[1e-9, 1e-9, 1 - 2e-9]],
    ),
}


def one_step(
    verifier: Verifier,
    target_laws: Sequence[Sequence[float]],
    draft_laws: Sequence[Sequence[float]],
    length: int,
    draw_draft: Callable[[BlockDraws, Law, int], Tensor] = BlockDraws.draft,
) -> Callable[[Draws], tuple[int, ...]]:
    """Draft `length` of the K tokens, verify, complete with the target's own: a text of K + 1 tokens.

    The laws do not depend on the text, so the text's law is a product, and completing it is one draw per token.
    """

    def run(draws: Draws) -> tuple[int, ...]:
        block = BlockDraws.of(draws, [0], [5], CPU, verifier.shares_noise)
        laws = Law(probs=torch.tensor(draft_laws, dtype=torch.float64).reshape(1, -1, 3))
        token_ids = torch.zeros(1, len(draft_laws), dtype=torch.long)
        for offset in range(length):
            token_ids[:, offset] = draw_draft(block, laws.at(offset), offset)
        proposal = DraftProposal(token_ids, (length,), laws)
        target = Law(probs=torch.tensor([target_laws], dtype=torch.float64))
        verification = verifier.verify(proposal, target, block)
        kept = verification.accepted[0]
        return (*proposal.token_ids[0, :kept].tolist(), verification.next_ids[0])

    return run


def completed(
    law: dict[tuple[int, ...], float], target_laws: Sequence[Sequence[float]]
) -> dict[tuple[int, ...], float]:
    """The law of whole texts, where what a step left open follows the target."""
    whole: dict[tuple[int, ...], float] = {}
    for text, probability in law.items():
        texts = {text: probability}
        for position in range(len(text), len(target_laws)):
            texts = {
                (*head, token): mass * prob
                for head, mass in texts.items()
                for token, prob in enumerate(target_laws[position])
            }
        for key, mass in texts.items():
            whole[key] = whole.get(key, 0.0) + mass
    return whole


def deviation(run: Callable[[Draws], tuple[int, ...]], target_laws: Sequence[Sequence[float]]) -> float:
    law = law_of(run)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    return total_variation(completed(law, target_laws), completed({(): 1.0}, target_laws))


# One step


@pytest.mark.parametrize("name", sorted(PAIRS))
@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_output_law_is_the_targets(verifier: str, name: str) -> None:
    target_laws, draft_laws = PAIRS[name]
    for width in range(len(draft_laws) + 1):
        for length in range(width + 1):
            run = one_step(VERIFIERS[verifier](), target_laws[: width + 1], draft_laws[:width], length)
            assert deviation(run, target_laws[: width + 1]) < EXACT, (width, length)


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_certain_drafts(verifier: str) -> None:
    """A drafter that copies: one-hot draft laws, dense target; every draft text."""
    for draft in ([0, 0], [1, 2], [2, 1]):

        def run(draws: Draws, draft: list[int] = draft) -> tuple[int, ...]:
            target = Law(probs=torch.tensor([TARGET[:3]], dtype=torch.float64))
            verification = VERIFIERS[verifier]().verify(
                DraftProposal.certain([draft], CPU), target, BlockDraws.of(draws, [0], [5], CPU)
            )
            return (*draft[: verification.accepted[0]], verification.next_ids[0])

        assert deviation(run, TARGET[:3]) < EXACT


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
@pytest.mark.parametrize("dense_draft", [True, False])
def test_greedy_target(verifier: str, dense_draft: bool) -> None:
    """A one-hot target, whatever law the draft has: the target's tokens with certainty, and no other."""
    greedy = [1, 0, 2]
    for draft in ([1, 0], [1, 1], [0, 0]):

        def run(draws: Draws, draft: list[int] = draft) -> tuple[tuple[int, ...], tuple[int, ...]]:
            laws = Law(probs=torch.tensor([DRAFT[:2]], dtype=torch.float64))
            proposal = DraftProposal.certain([draft], CPU)
            if dense_draft:
                proposal = replace(proposal, laws=laws)
            verification = VERIFIERS[verifier]().verify(
                proposal, Law(ids=torch.tensor([greedy])), BlockDraws.of(draws, [0], [5], CPU)
            )
            return verification.accepted, verification.next_ids

        agreeing = next((i for i in range(2) if draft[i] != greedy[i]), 2)
        assert law_of(run) == {((agreeing,), (greedy[agreeing],)): 1.0}


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_rows_of_unequal_length_are_independent(verifier: str) -> None:
    """Two rows, lengths 2 and 1, other requests: the joint law is the product of both targets'."""
    laws = Law(probs=torch.tensor([DRAFT[:2], [DRAFT[2], [1.0, 0.0, 0.0]]], dtype=torch.float64))
    targets = [TARGET[:3], [TARGET[3], TARGET[2], [0.0, 0.0, 1.0]]]

    def run(draws: Draws) -> tuple[int, int]:
        block = BlockDraws.of(draws, [3, 8], [5, 9], CPU)
        token_ids = torch.stack([block.draft(laws.at(offset), offset) for offset in range(2)], 1)
        verification = VERIFIERS[verifier]().verify(
            DraftProposal(token_ids, (2, 1), laws),
            Law(probs=torch.tensor(targets, dtype=torch.float64)),
            block,
        )
        first = [
            tokens[0] if kept else following
            for tokens, kept, following in zip(
                token_ids.tolist(), verification.accepted, verification.next_ids, strict=True
            )
        ]
        return first[0], first[1]

    product = {(a, b): TARGET[0][a] * TARGET[3][b] for a in range(3) for b in range(3)}
    assert total_variation(law_of(run), product) < EXACT


def test_greedy_is_not_decided_by_soft_probabilities() -> None:
    """A draft of token 0 that the target's soft law would accept half of the time: greedy says token 1."""
    proposal = replace(
        DraftProposal.certain([[0]], CPU), laws=Law(probs=torch.tensor([[[0.2, 0.4, 0.4]]]).double())
    )
    target = Law(ids=torch.tensor([[1, 2]]))
    for seed in range(50):
        block = BlockDraws.of(KeyedDraws(seed), [0], [5], CPU)
        assert TokenVerifier().verify(proposal, target, block) == Verification((0,), (1,))


def test_acceptance_is_the_summed_minimum() -> None:
    """Of the first draft token: sum_v min(target, draft), the most any verifier can accept."""
    run = one_step(TokenVerifier(), TARGET[:2], DRAFT[:1], 1)

    def accepted(draws: Draws) -> bool:
        return len(run(draws)) == 2

    assert law_of(accepted)[True] == pytest.approx(0.40 + 0.15 + 0.05, abs=EXACT)


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_what_lies_behind_a_length_is_not_looked_at(verifier: str) -> None:
    laws = torch.tensor([DRAFT[:2]], dtype=torch.float64)
    garbage = laws.clone()
    garbage[0, 1] = torch.nan
    results = []
    for padded_laws, token in ((laws, 0), (garbage, 2)):
        target = torch.tensor([TARGET[:3]], dtype=torch.float64)
        target[0, 2] = torch.nan
        proposal = DraftProposal(torch.tensor([[0, token]]), (1,), Law(probs=padded_laws))
        results.append(
            [
                VERIFIERS[verifier]().verify(
                    proposal, Law(probs=target), BlockDraws.of(KeyedDraws(seed), [0], [5], CPU)
                )
                for seed in range(20)
            ]
        )
    assert results[0] == results[1]
    assert {verification.accepted for verification in results[0]} == {(0,), (1,)}


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_bonus_token_is_what_plain_sampling_draws_at_its_position(verifier: str, length: int) -> None:
    """Equal laws, so all is accepted: the bonus token is a function of the seed, its position and its law."""
    num_rows = 50
    requests, start = torch.arange(num_rows), 5
    laws = torch.tensor(TARGET[:3], dtype=torch.float64).expand(num_rows, -1, -1)
    shares_noise = VERIFIERS[verifier]().shares_noise
    block = BlockDraws.of(KeyedDraws(0), requests.tolist(), [start] * num_rows, CPU, shares_noise)
    token_ids = torch.stack([block.draft(Law(probs=laws[:, offset]), offset) for offset in range(2)], 1)
    proposal = DraftProposal(token_ids, (length,) * num_rows, Law(probs=laws[:, :2]))
    verification = VERIFIERS[verifier]().verify(proposal, Law(probs=laws), block)
    at = Keys(Purpose.TARGET, requests, torch.full_like(requests, start + length), torch.zeros_like(requests))
    assert verification.accepted == (length,) * num_rows
    assert verification.next_ids == tuple(KeyedDraws(0).pick(Law(probs=laws[:, length]), at).tolist())


# Planted faults of one step: each must be seen


class WrongResidual(TokenVerifier):
    """After a rejection draws from the target instead of what is left of it."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        lengths = torch.tensor(proposal.lengths)
        accepted = self._accepted(proposal, lengths, target, draws)
        next_ids = draws.target(target.take(accepted), accepted)
        return Verification(tuple(accepted.tolist()), tuple(next_ids.tolist()))


class WithBlockDraws(TokenVerifier):
    """The right verifier with wrong draws."""

    def __init__(self, wrong: type[BlockDraws]) -> None:
        self.wrong = wrong

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        return super().verify(proposal, target, self.wrong(draws.draws, draws.request_ids, draws.starts))


class SharedUniform(BlockDraws):
    """Recovers with the number that rejected."""

    def recovered(self, law: Law, offsets: Tensor) -> Tensor:
        return self.draws.pick(law, Keys(Purpose.ACCEPT, self.request_ids, self.starts, offsets))


class SharedWithDraft(BlockDraws):
    """Accepts with the number that drew the draft token."""

    def accept(self, prob: Tensor, offset: int) -> Tensor:
        return self.draws.accept(prob, self._block_keys(Purpose.DRAFT, offset))


class OneUniformForAllOffsets(BlockDraws):
    """Reseeds before every acceptance: always the same number."""

    def accept(self, prob: Tensor, offset: int) -> Tensor:
        return self.draws.accept(prob, self._block_keys(Purpose.ACCEPT, 0))


class NeverRejects(TokenVerifier):
    def _accepted(self, proposal: DraftProposal, lengths: Tensor, target: Law, draws: BlockDraws) -> Tensor:
        return lengths


def draft_the_likeliest(draws: BlockDraws, law: Law, offset: int) -> Tensor:
    assert law.probs is not None
    return law.probs.argmax(-1)


@pytest.mark.parametrize(
    "fault",
    [
        WrongResidual(),
        WithBlockDraws(SharedUniform),
        WithBlockDraws(SharedWithDraft),
        WithBlockDraws(OneUniformForAllOffsets),
        NeverRejects(),
    ],
    ids=["wrong_residual", "shared_uniform", "shared_with_draft", "one_uniform_for_all", "never_rejects"],
)
def test_a_faulty_verifier_is_caught(fault: Verifier) -> None:
    assert deviation(one_step(fault, TARGET[:3], DRAFT[:2], 2), TARGET[:3]) > 0.01


def test_a_draft_by_argmax_with_a_soft_law_is_caught() -> None:
    run = one_step(TokenVerifier(), TARGET[:3], DRAFT[:2], 2, draft_the_likeliest)
    assert deviation(run, TARGET[:3]) > 0.01


# The whole decoder over several blocks: laws that depend on the last two tokens


def target_law(text: Sequence[int]) -> Sequence[float]:
    return [[0.45, 0.20, 0.35], [0.25, 0.60, 0.15], [0.10, 0.30, 0.60]][(text[-1] + 2 * text[-2]) % 3]


def draft_law(text: Sequence[int]) -> Sequence[float]:
    return [[0.80, 0.15, 0.05], [0.50, 0.10, 0.40], [0.05, 0.60, 0.35]][(2 * text[-1] + text[-2]) % 3]


def binary_target(text: Sequence[int]) -> Sequence[float]:
    return [[0.3, 0.7], [0.85, 0.15], [0.6, 0.4]][(text[-1] + 2 * text[-2]) % 3]


def binary_draft(text: Sequence[int]) -> Sequence[float]:
    return [[0.6, 0.4], [0.5, 0.5], [0.1, 0.9]][(2 * text[-1] + text[-2]) % 3]


PROMPT = (0, 1)


def text_law(
    law: Callable[[Sequence[int]], Sequence[float]], num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The law of the first tokens behind the prompt under plain sampling, by hand."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        texts = {
            (*text, token): mass * prob
            for text, mass in texts.items()
            for token, prob in enumerate(law([*PROMPT, *text]))
        }
    return texts


def whole_decoder(
    num_tokens: int,
    *,
    binary: bool = False,
    draft_length: int | DraftLength = 2,
    verifier: Verifier | None = None,
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    stop_ids: Sequence[int] = (),
) -> Callable[[Draws], tuple[int, ...]]:
    def run(draws: Draws) -> tuple[int, ...]:
        vocab_size = 2 if binary else 3
        drafter = wrap(toy_drafter(binary_draft if binary else draft_law, vocab_size, 1, temperature=1))
        decoder = build_decoder(
            ToyRunner(binary_target if binary else target_law, vocab_size, 1),
            num_slots=1,
            drafter=drafter,
            draft_length=draft_length,
            verifier=verifier,
            temperature=1,
            draws=draws,
            stop_ids=stop_ids,
        )
        return tuple(collect(decoder.generate(requests_for([PROMPT], num_tokens)))[0])

    return run


def whole_deviation(run: Callable[[Draws], tuple[int, ...]], num_tokens: int, binary: bool = False) -> float:
    return total_variation(law_of(run), text_law(binary_target if binary else target_law, num_tokens))


def test_the_decoders_law_over_several_blocks() -> None:
    """Four tokens, from one block of three or up to three blocks."""
    assert whole_deviation(whole_decoder(4, binary=True), 4, binary=True) < EXACT


def test_the_decoders_law_with_a_vocabulary_of_three() -> None:
    assert whole_deviation(whole_decoder(4), 4) < EXACT


@pytest.mark.slow
def test_the_decoders_law_over_more_blocks() -> None:
    assert whole_deviation(whole_decoder(5, binary=True, draft_length=3), 5, binary=True) < EXACT


def test_the_decoders_law_when_drafting_stops_by_the_prefix() -> None:
    run = whole_decoder(4, binary=True, draft_length=ConfidenceDraftLength(2, 0.55))
    assert whole_deviation(run, 4, binary=True) < EXACT


def test_the_law_of_texts_that_may_stop_inside_a_block() -> None:
    stopped: dict[tuple[int, ...], float] = {}
    for text, mass in text_law(binary_target, 4).items():
        end = text.index(1) + 1 if 1 in text else 4
        stopped[text[:end]] = stopped.get(text[:end], 0.0) + mass
    assert total_variation(law_of(whole_decoder(4, binary=True, stop_ids=[1])), stopped) < EXACT


class DropsWhatItDislikes(Drafter):
    """Looks at a drawn token and drops it: the tokens that remain are no longer drawn from the reported law."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        proposal = self.drafter.propose(rows, limits, go_on, draws)
        keep = 0
        for token in proposal.token_ids[0, : proposal.lengths[0]].tolist():
            if token == 0:
                break
            keep += 1
        return replace(proposal, lengths=(keep,))

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self.drafter.accept(rows, verification)


class KeyedByOffsetAlone(TokenVerifier):
    """Every block uses the same numbers again."""

    def verify(self, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        return super().verify(proposal, target, replace(draws, starts=torch.zeros_like(draws.starts)))


class ReportsAnotherLaw(Drafter):
    """Draws from one law and reports another."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        proposal = self.drafter.propose(rows, limits, go_on, draws)
        if proposal.laws.probs is None:  # nothing was drafted
            return proposal
        return replace(proposal, laws=Law(probs=proposal.laws.probs.flip(-1)))

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self.drafter.accept(rows, verification)


@pytest.mark.parametrize(
    "fault", [WrongResidual(), KeyedByOffsetAlone()], ids=lambda fault: type(fault).__name__
)
def test_a_decoder_with_a_faulty_verifier_is_caught(fault: Verifier) -> None:
    run = whole_decoder(4, binary=True, verifier=fault)
    assert whole_deviation(run, 4, binary=True) > 0.01


@pytest.mark.parametrize("fault", [DropsWhatItDislikes, ReportsAnotherLaw])
def test_a_decoder_with_a_faulty_drafter_is_caught(fault: Callable[[Drafter], Drafter]) -> None:
    run = whole_decoder(4, binary=True, wrap=fault)
    assert whole_deviation(run, 4, binary=True) > 0.01


# The instrument itself


def test_enumeration_of_a_key_asked_twice() -> None:
    """One number below 0.5 and then below 0.25, as one number is; two keys would give 1/8."""

    def keys(offset: int) -> Keys:
        zero = torch.zeros(1, dtype=torch.long)
        return Keys(Purpose.ACCEPT, zero, zero, zero + offset)

    def run(draws: Draws, second: int) -> tuple[bool, bool]:
        first = bool(draws.accept(torch.tensor([0.5]), keys(0)))
        return first, bool(draws.accept(torch.tensor([0.25]), keys(second)))

    same = law_of(lambda draws: run(draws, 0))
    assert same == {(True, True): 0.25, (True, False): 0.25, (False, False): 0.5}
    other = law_of(lambda draws: run(draws, 1))
    assert other == {(True, True): 0.125, (True, False): 0.375, (False, True): 0.125, (False, False): 0.375}


def test_enumeration_skips_what_cannot_happen() -> None:
    zero = torch.zeros(3, dtype=torch.long)
    keys = Keys(Purpose.ACCEPT, torch.arange(3), zero, zero)

    def accept(draws: Draws) -> tuple[bool, ...]:
        return tuple(draws.accept(torch.tensor([0.0, 1.0, torch.nan]), keys).tolist())

    assert list(outcomes(accept)) == [((False, True, False), 1.0)]

    def pick(draws: Draws) -> tuple[int, ...]:
        law = Law(probs=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]))
        return tuple(draws.pick(law, keys).tolist())

    assert law_of(pick) == {(1, 1, 0): 0.5, (1, 2, 0): 0.5}
    assert law_of(lambda draws: tuple(draws.pick(Law(ids=torch.tensor([4, 5])), keys).tolist())) == {
        (4, 5): 1.0
    }


def test_the_real_draws_give_the_enumerated_law() -> None:
    """20000 requests at once against the exact law of one step: chi-square with a false alarm rate of 1e-6."""
    num_rows = 20_000
    exact = law_of(one_step(TokenVerifier(), TARGET[:3], DRAFT[:2], 2))
    block = BlockDraws.of(KeyedDraws(0), range(num_rows), [5] * num_rows, CPU)
    laws = Law(probs=torch.tensor(DRAFT[:2], dtype=torch.float64).expand(num_rows, -1, -1))
    token_ids = torch.stack([block.draft(laws.at(offset), offset) for offset in range(2)], 1)
    target = Law(probs=torch.tensor(TARGET[:3], dtype=torch.float64).expand(num_rows, -1, -1))
    verification = TokenVerifier().verify(DraftProposal(token_ids, (2,) * num_rows, laws), target, block)
    counts = Counter(
        (*tokens[:kept], following)
        for tokens, kept, following in zip(
            token_ids.tolist(), verification.accepted, verification.next_ids, strict=True
        )
    )
    assert counts.keys() == exact.keys()
    texts = sorted(exact)
    scale = num_rows / sum(exact.values())
    assert chisquare([counts[t] for t in texts], [exact[t] * scale for t in texts]).pvalue > 1e-6
