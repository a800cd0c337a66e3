"""CASES S9 to S12 and S23: options under speculation, stops, and block verification."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from toy_engine import CPU, ToyRunner, build_decoder, chain, collect, requests_for, script, toy_drafter
from toy_models import greedy_reference, tiny_model

from specdec.drafters.base import Drafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.draws import BlockDraws, Draws
from specdec.enumeration import law_of, total_variation
from specdec.progress import Row
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Law, SamplingParams
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.token import TokenVerifier

pytestmark = pytest.mark.usefixtures("one_thread")
FLAT = [0.4, 0.35, 0.15, 0.1]


class Repeats(Drafter):
    """Drafts the same tokens again and again."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        return DraftProposal.certain([self.token_ids[:limit] for limit in limits], CPU)


@pytest.mark.parametrize("drafter", [None, Repeats([2, 3, 2])], ids=["plain", "speculative"])
def test_s09_no_token_below_the_floor_of_min_p(drafter: Drafter | None) -> None:
    sampler = Sampler(SamplingParams(1.0, min_p=0.5))  # of the largest, 0.4: tokens 2 and 3 are below
    decoder = build_decoder(
        ToyRunner(lambda text: FLAT, 4, 1), num_slots=1, drafter=drafter, draft_length=3, sampler=sampler
    )
    written = collect(decoder.generate(requests_for([[0]], 300)))[0]
    assert set(written) == {0, 1}


def test_s09_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="mirostat"):
        SamplingParams(mirostat=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("draft_length", [1, 4])
def test_s10_a_penalty_counts_each_token_of_the_true_prefix_once(draft_length: int) -> None:
    model, prompt = tiny_model("llama"), [7, 7, 7]
    sampling = SamplingParams(repetition_penalty=5.0)
    expected = greedy_reference(model, prompt, 14, None, sampling)
    for drafter in (Repeats([7] * 4), Repeats(expected[:4]), PromptLookupDrafter(1, 3, CPU)):
        decoder = build_decoder(
            ModelRunner(model, 1, 20),
            num_slots=1,
            drafter=drafter,
            draft_length=draft_length,
            sampler=Sampler(sampling),
        )
        assert collect(decoder.generate(requests_for([prompt], 14)))[0] == expected


TARGET, DRAFT = (0.4, 0.25, 0.35), (0.8, 0.15, 0.05)


@pytest.mark.parametrize("verifier", [BlockVerifier(), TokenVerifier()], ids=["block", "token"])
@pytest.mark.parametrize("num_drafted", [2, 3])
def test_s11_the_output_law_of_a_block_is_the_targets(
    verifier: BlockVerifier | TokenVerifier, num_drafted: int
) -> None:
    def run(draws: Draws) -> tuple[int, ...]:
        block = BlockDraws.of(draws, [0], [1], CPU)
        laws = Law(probs=torch.tensor([[DRAFT] * num_drafted], dtype=torch.float64))
        token_ids = torch.stack([block.draft(laws.at(offset), offset) for offset in range(num_drafted)], 1)
        target = Law(probs=torch.tensor([[TARGET] * (num_drafted + 1)], dtype=torch.float64))
        found = verifier.verify(DraftProposal(token_ids, (num_drafted,), laws), target, block)
        text = [*token_ids[0, : found.accepted[0]].tolist(), found.next_ids[0]]
        # What the step left open follows the target.
        rest = [
            int(block.target(target.at(offset), torch.tensor([offset])))
            for offset in range(len(text), num_drafted + 1)
        ]
        return (*text, *rest)

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_drafted + 1):
        expected = {(*t, i): m * TARGET[i] for t, m in expected.items() for i in range(3)}
    assert total_variation(law_of(run), expected) < 1e-12


def test_s11_block_verification_lets_more_tokens_stand() -> None:
    def accepted(verifier: BlockVerifier | TokenVerifier) -> float:
        def run(draws: Draws) -> int:
            block = BlockDraws.of(draws, [0], [1], CPU)
            laws = Law(probs=torch.tensor([[DRAFT] * 3], dtype=torch.float64))
            token_ids = torch.stack([block.draft(laws.at(offset), offset) for offset in range(3)], 1)
            target = Law(probs=torch.tensor([[TARGET] * 4], dtype=torch.float64))
            return verifier.verify(DraftProposal(token_ids, (3,), laws), target, block).accepted[0]

        return sum(count * mass for count, mass in law_of(run).items())

    assert accepted(BlockVerifier()) > accepted(TokenVerifier()) + 0.01


STOP = 5
TEXT = [1, 2, STOP, 3, 4, STOP, 6, 7]


@pytest.mark.parametrize("ignore_stop", [False, True])
@pytest.mark.parametrize("min_new_tokens", [0, 3, 4])
@pytest.mark.parametrize("limit", [1, 5, 8])
@pytest.mark.parametrize("draft_length", [1, 2, 5])
def test_s12_stops_limits_and_least_lengths_combine_as_in_plain_decoding(
    ignore_stop: bool, min_new_tokens: int, limit: int, draft_length: int
) -> None:
    stop_ids = () if ignore_stop else (STOP,)
    written = []
    for drafter in (None, toy_drafter(script(TEXT, 8, 1), 8, 1), Repeats([1, 2, STOP, 3, 4])):
        sampler = Sampler(SamplingParams(min_new_tokens=min_new_tokens), stop_ids)
        decoder = build_decoder(
            ToyRunner(_with_second_choice(TEXT), 8, 1),
            num_slots=1,
            drafter=drafter,
            draft_length=draft_length,
            sampler=sampler,
            stop_ids=stop_ids,
        )
        written.append(collect(decoder.generate(requests_for([[0]], limit)))[0])
    plain = written[0]
    assert written == [plain] * 3
    assert len(plain) <= limit
    if stop_ids:
        assert STOP not in plain[:-1]
        assert len(plain) >= min(limit, min_new_tokens)


def _with_second_choice(tokens: Sequence[int]):  # type: ignore[no-untyped-def]
    """Writes `tokens`; where one is banned, token 0."""

    def law(text: Sequence[int]) -> list[float]:
        wanted = tokens[(len(text) - 1) % len(tokens)]
        return [0.9 if token == wanted else 0.09 if token == 0 else 0.01 / 6 for token in range(8)]

    return law


def test_s23_the_law_of_four_tokens_over_several_blocks_with_block_verification() -> None:
    target = chain([[0.3, 0.7], [0.8, 0.2]])
    draft = chain([[0.6, 0.4], [0.35, 0.65]])

    def run(draws: Draws) -> tuple[int, ...]:
        decoder = build_decoder(
            ToyRunner(target, 2, 1),
            num_slots=1,
            drafter=toy_drafter(draft, 2, 1, temperature=1.0),
            draft_length=3,
            verifier=BlockVerifier(),
            temperature=1.0,
            draws=draws,
        )
        return tuple(collect(decoder.generate(requests_for([[0]], 4)))[0])

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        expected = {(*t, i): m * target([0, *t])[i] for t, m in expected.items() for i in range(2)}
    assert total_variation(law_of(run), expected) < 1e-12
