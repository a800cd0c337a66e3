"""Faults that others shipped (S1 to S22), each on the smallest input that shows it.

The last tests break the engine in one place at a time and demand that the case which is meant to see it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_engine import (
    CPU,
    ToyRunner,
    build_decoder,
    collect,
    model_drafter,
    requests_for,
    script,
    toy_drafter,
)
from toy_models import greedy_reference, random_prompts, tiny_model
from transformers import PreTrainedModel

from specdec import ModelRunner, PromptLookupOptions, generate, generate_steps
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.draws import BlockDraws, Draws, KeyedDraws, Keys, Purpose
from specdec.enumeration import law_of, total_variation
from specdec.kv_cache import KVCache, PassLayout
from specdec.progress import Progress, Row, StopTokens
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Law, Phase, Request, StepOutput, Verification
from specdec.verifiers.token import TokenVerifier

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET, DRAFT = [0.40, 0.25, 0.35], [0.80, 0.15, 0.05]
THREE_TOKENS: dict[tuple[int, ...], float] = {
    (a, b, c): TARGET[a] * TARGET[b] * TARGET[c] for a in range(3) for b in range(3) for c in range(3)
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return tiny_model("qwen2", seed=5)


class FixedDrafts(Drafter):
    """Proposes, whatever the text, the first tokens of the given draft of each request."""

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        self.drafts = drafts

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        drafts = [self.drafts[row.request.request_id] for row in rows]
        return DraftProposal.certain([d[:n] for d, n in zip(drafts, limits, strict=True)], CPU)


class Oracle(Drafter):
    """Knows the answers: proposes `num_right` right tokens per request, then wrong ones up to `num_tokens`."""

    def __init__(
        self, answers: Sequence[Sequence[int]], num_right: Sequence[int], num_tokens: Sequence[int]
    ) -> None:
        self.answers, self.num_right, self.num_tokens = answers, num_right, num_tokens

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        drafts = []
        for row, limit in zip(rows, limits, strict=True):
            index = row.request.request_id
            done = len(row.token_ids) - len(row.request.prompt_ids)
            ahead = list(self.answers[index][done : done + min(limit, self.num_tokens[index])])
            drafts.append([t if i < self.num_right[index] else (t + 1) % 61 for i, t in enumerate(ahead)])
        return DraftProposal.certain(drafts, CPU)


def check_s01(model: PreTrainedModel) -> None:
    prompt = random_prompts([6])[0]
    stop = greedy_reference(model, prompt, 3)[2]
    expected = greedy_reference(model, prompt, 20, [stop])
    assert len(expected) <= 3
    steps = list(
        generate_steps(
            model, [prompt], drafter=model, draft_length=5, max_new_tokens=20, stop_token_ids=[stop]
        )
    )
    assert [token for step in steps for token in step.committed[0]] == expected
    assert steps[-1].finished == (True,)
    assert sum(step.accepted[0] for step in steps) == len(expected) - len(steps)


def test_s01_stop_inside_accepted_block(model: PreTrainedModel) -> None:
    check_s01(model)


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_s02_limit_is_never_overshot(
    model: PreTrainedModel, draft: PreTrainedModel, max_new_tokens: int
) -> None:
    """K = 5 and limits of 1 .. K + 2, repetitive prompt, every drafter."""
    prompt = [7, 8, 9] * 4
    expected = greedy_reference(model, prompt, max_new_tokens)
    for drafter in (None, model, draft, PromptLookupOptions()):
        for steps in (5, 1):
            answer = generate(
                model, [prompt], drafter=drafter, draft_length=steps, max_new_tokens=max_new_tokens
            )
            assert answer == [expected]


def test_s03_reported_law_is_the_drawn_law() -> None:
    """The draft model samples from a law without its unlikely tokens; what it reports is that law."""
    truncated = [0.5, 0.3, 0.2, 0, 0, 0, 0, 0]
    target = [0.05, 0.1, 0.15, 0.2, 0.2, 0.1, 0.1, 0.1]

    def run(draws: Draws) -> tuple[int, ...]:
        decoder = build_decoder(
            ToyRunner(lambda text: target, 8, 1),
            num_slots=1,
            drafter=toy_drafter(lambda text: truncated, 8, 1, temperature=1),
            draft_length=1,
            temperature=1,
            draws=draws,
        )
        steps = decoder.generate([Request(0, (0,), 3)])
        next(steps)
        return next(steps).committed[0][:1]

    expected: dict[tuple[int, ...], float] = {(token,): prob for token, prob in enumerate(target)}
    assert total_variation(law_of(run), expected) < 1e-12


def test_s04_greedy_draft_under_a_sampling_target() -> None:
    """The draft model takes its argmax: its law is one-hot, and the output law the target's."""

    def run(draws: Draws) -> tuple[int, ...]:
        decoder = build_decoder(
            ToyRunner(lambda text: TARGET, 3, 1),
            num_slots=1,
            drafter=toy_drafter(lambda text: DRAFT, 3, 1, temperature=0),
            draft_length=2,
            temperature=1,
            draws=draws,
        )
        return tuple(collect(decoder.generate([Request(0, (0,), 3)]))[0])

    assert total_variation(law_of(run), THREE_TOKENS) < 1e-12


def check_s05(model: PreTrainedModel) -> None:
    prompt = random_prompts([6])[0]
    answer = greedy_reference(model, prompt, 12)
    runner = RecordingRunner(model, 1, 20)
    decoder = build_decoder(runner, num_slots=1, drafter=Oracle([answer], [0], [4]), draft_length=4)
    assert collect(decoder.generate([Request(0, tuple(prompt), 12)]))[0] == answer
    with torch.no_grad():
        reference = model(torch.tensor([prompt + answer])).logits[0, len(prompt) :]
    for logits, expected in zip(runner.verified, reference, strict=False):
        torch.testing.assert_close(logits[0, 0], expected, rtol=0, atol=1e-12)
    assert len(runner.verified) == 10  # the last token has no room for a draft


class RecordingRunner(ModelRunner):
    """Keeps the logits of each verification."""

    def __init__(self, model: PreTrainedModel, num_slots: int, capacity: int) -> None:
        super().__init__(model, num_slots, capacity)
        self.verified: list[Tensor] = []
        self.num_tokens = {Phase.PREFILL: 0, Phase.DECODE: 0, Phase.VERIFY: 0}

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        self.num_tokens[Phase.PREFILL] += sum(map(len, prompts))
        return super().prefill(prompts, slots)

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        self.num_tokens[Phase.DECODE] += token_ids.numel() if counts is None else sum(counts)
        return super().decode(token_ids, counts)

    def verify(self, token_ids: Tensor, counts: Sequence[int]) -> Tensor:
        self.num_tokens[Phase.VERIFY] += sum(counts)
        self.verified.append(super().verify(token_ids, counts))
        return self.verified[-1]


def test_s05_positions_are_right_after_rollback(model: PreTrainedModel) -> None:
    """A drafter that is always wrong: the logits of each step equal a fresh forward's."""
    check_s05(model)


def check_s06() -> None:
    progress = Progress([Request(0, (1,), 20)], 1, StopTokens([99]))
    step = progress.commit(Phase.VERIFY, progress.admit(), [[11, 12, 99, 14, 15, 16]], [5])
    assert step.committed == ((11, 12, 99),)
    assert step.accepted == (2,)


def test_s06_tokens_behind_the_stop_are_not_counted_as_accepted() -> None:
    check_s06()
    # and through the whole decoder, with the target writing what is drafted
    answer = [5, 1, 2, 9, 3, 4, 6]
    decoder = build_decoder(
        ToyRunner(script(answer, 10, 1), 10, 1),
        num_slots=1,
        drafter=toy_drafter(script(answer, 10, 1), 10, 1),
        draft_length=5,
        stop_ids=[9],
    )
    prefill, verify = decoder.generate([Request(0, (0,), 20)])
    assert prefill.committed == ((5,),)
    assert (verify.committed, verify.accepted, verify.drafted) == (((1, 2, 9),), (2,), (2,))


def check_s07(model: PreTrainedModel, temperature: float, draft_length: int) -> None:
    prompts = random_prompts([3, 9, 17])
    runner = ModelRunner(model, 3, 60)
    drafter = model_drafter(model, 3, 60, temperature)
    decoder = build_decoder(
        runner,
        num_slots=3,
        drafter=drafter,
        draft_length=draft_length,
        temperature=temperature,
        seed=11,
    )
    for step in decoder.generate(requests_for(prompts, [40, 30, 35])):
        assert step.accepted == step.drafted
        for slot, drafted in enumerate(step.drafted):
            if drafted:  # all but the last accepted draft token, which is read together with the bonus token
                assert drafter.runner.lengths[slot] == runner.lengths[slot] - 1


@pytest.mark.parametrize("draft_length", [1, 3, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s07_a_draft_that_is_the_target_is_fully_accepted(
    model: PreTrainedModel, temperature: float, draft_length: int
) -> None:
    check_s07(model, temperature, draft_length)


def sampled(
    model: PreTrainedModel, requests: Sequence[Request], drafter: Drafter | None, seed: int = 3
) -> dict[int, list[int]]:
    decoder = build_decoder(
        ModelRunner(model, 4, 40), num_slots=4, drafter=drafter, draft_length=3, temperature=1.0, seed=seed
    )
    return collect(decoder.generate(requests))


@pytest.mark.parametrize("kind", ["plain", "draft_model", "prompt_lookup"])
def test_s08_seeds_are_reproducible_and_blind_to_batch_mates(
    model: PreTrainedModel, draft: PreTrainedModel, kind: str
) -> None:
    def drafter() -> Drafter | None:
        if kind == "draft_model":
            return model_drafter(draft, 4, 40, temperature=1.0)
        return PromptLookupDrafter(1, 3, CPU) if kind == "prompt_lookup" else None

    prompts = random_prompts([3, 9, 5])
    requests = requests_for([*prompts, prompts[0]], 12)  # the first and the last prompt are identical
    together = sampled(model, requests, drafter())
    assert sampled(model, requests, drafter()) == together
    assert sampled(model, requests[::-1], drafter()) == together
    for request in requests:
        assert sampled(model, [request], drafter()) == {request.request_id: together[request.request_id]}
    assert together[0] != together[3]
    assert sampled(model, requests, drafter(), seed=4) != together


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_s13_one_draft_token_at_temperature_1(
    model: PreTrainedModel, draft: PreTrainedModel, drafter: str
) -> None:
    """K = 1 over 100 tokens, no word dropped: each committed token was drafted, recovered or a bonus."""
    [prompt] = random_prompts([9])
    steps = list(
        generate_steps(
            model,
            [prompt * 2],
            drafter=draft if drafter == "draft_model" else PromptLookupOptions(),
            draft_length=1,
            max_new_tokens=100,
            temperature=1.0,
        )
    )
    assert sum(len(step.committed[0]) for step in steps) == 100
    assert all(len(step.committed[0]) == step.accepted[0] + 1 for step in steps)


def test_s13_one_draft_token_has_the_exact_law() -> None:
    def run(draws: Draws) -> tuple[int, ...]:
        decoder = build_decoder(
            ToyRunner(lambda text: TARGET, 3, 1),
            num_slots=1,
            drafter=toy_drafter(lambda text: DRAFT, 3, 1, temperature=1),
            draft_length=1,
            temperature=1,
            draws=draws,
        )
        return tuple(collect(decoder.generate([Request(0, (0,), 3)]))[0])

    assert total_variation(law_of(run), THREE_TOKENS) < 1e-12


def test_s14_acceptance_is_the_summed_minimum_of_both_laws() -> None:
    """0.40 + 0.15 + 0.05, over 2000 rows within five standard deviations (false alarm 1e-6)."""
    num_rows = 2000
    block = BlockDraws.of(KeyedDraws(0), range(num_rows), [7] * num_rows, CPU)
    laws = Law(probs=torch.tensor([DRAFT], dtype=torch.float64).expand(num_rows, 1, 3))
    proposal = DraftProposal(block.draft(laws.at(0), 0).unsqueeze(1), (1,) * num_rows, laws)
    target = Law(probs=torch.tensor([TARGET, TARGET], dtype=torch.float64).expand(num_rows, 2, 3))
    accepted = sum(TokenVerifier().verify(proposal, target, block).accepted) / num_rows
    assert abs(accepted - 0.60) < 5 * (0.6 * 0.4 / num_rows) ** 0.5


def test_s15_limit_smaller_than_a_block(model: PreTrainedModel) -> None:
    prompts = random_prompts([5, 7])
    steps = list(generate_steps(model, prompts, drafter=model, draft_length=8, max_new_tokens=4))
    for index, prompt in enumerate(prompts):
        tokens = [token for step in steps for token in step.committed[index]]
        assert tokens == greedy_reference(model, prompt, 4)
    assert len(steps) == 2
    assert steps[1].drafted == steps[1].accepted == (2, 2)


def test_s16_greedy_is_not_decided_by_soft_probabilities() -> None:
    """Target (.3, .5, .2); the draft samples, gives token 0 probability .2 and drafts it: token 1 is written."""
    target = [0.3, 0.5, 0.2]
    for seed in range(30):
        decoder = build_decoder(
            ToyRunner(lambda text: target, 3, 1),
            num_slots=1,
            drafter=toy_drafter(lambda text: [0.2, 0.4, 0.4], 3, 1, temperature=1),
            seed=seed,
        )
        assert collect(decoder.generate([Request(0, (0,), 9)]))[0] == [1] * 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_s17_the_recorded_law_is_the_one_drawn_from(dtype: torch.dtype) -> None:
    """Of a draft model in half precision: one softmax, in float32, for the draw and for the verdict."""

    class Spy(KeyedDraws):
        def pick(self, law: Law, keys: Keys) -> Tensor:
            assert keys.purpose == Purpose.DRAFT
            drawn.append(law)
            return super().pick(law, keys)

    drawn: list[Law] = []
    rows = [Row(Request(0, (1, 2, 3), 9), 0), Row(Request(1, (4, 5), 9), 1)]
    drafter = model_drafter(tiny_model("llama", dtype=dtype), 2, 20, temperature=1.0)
    block = BlockDraws.of(Spy(0), [0, 1], [3, 2], CPU)
    proposal = drafter.propose(rows, [3, 2], lambda law, step: [True, True], block)
    for offset, law in enumerate(drawn):
        reported = proposal.laws.at(offset).probs
        assert reported is not None
        assert law.probs is not None
        assert reported.dtype == torch.float32
        assert torch.equal(reported, law.probs)
    assert len(drawn) == 3


def check_s18(model: PreTrainedModel) -> None:
    prompts = random_prompts([3, 9, 17])
    answers = [greedy_reference(model, prompt, 24) for prompt in prompts]
    for num_right in ([0, 2, 5], [5, 0, 2], [2, 5, 0]):
        decoder = build_decoder(
            ModelRunner(model, 3, 50),
            num_slots=3,
            drafter=Oracle(answers, num_right, [5, 5, 5]),
            draft_length=5,
        )
        steps = list(decoder.generate(requests_for(prompts, 24)))
        assert collect(steps) == dict(enumerate(answers))
        assert steps[1].accepted == tuple(num_right)


def test_s18_ragged_batch(model: PreTrainedModel) -> None:
    """Prompts of 3, 9, 17 tokens, rows accepting 0, 2 and 5: equal to one by one."""
    check_s18(model)


def test_s19_ties_are_broken_alike_on_every_path(draft: PreTrainedModel) -> None:
    """All logits equal, in float32 and bfloat16: token 0 from prefill, decode, draft and verification."""
    for dtype in (torch.float32, torch.bfloat16):
        flat = tiny_model("llama", dtype=dtype)
        torch.nn.init.zeros_(flat.lm_head.weight)
        for drafter in (None, flat, tiny_model("qwen2", dtype=dtype), PromptLookupOptions()):
            answers = generate(flat, [[3, 4], [5]], drafter=drafter, max_new_tokens=9)
            assert answers == [[0] * 9] * 2


def test_s19_two_equal_top_logits() -> None:
    """The first of both is the greedy token; a drafter that says the other one is rejected."""
    tied = [0.1, 0.4, 0.1, 0.4]
    for drafter in (
        None,
        toy_drafter(lambda text: tied, 4, 1),
        FixedDrafts([[3, 3, 3]]),
        FixedDrafts([[1, 3, 1]]),
    ):
        decoder = build_decoder(ToyRunner(lambda text: tied, 4, 1), num_slots=1, drafter=drafter)
        assert collect(decoder.generate([Request(0, (0,), 7)]))[0] == [1] * 7


def check_s20(model: PreTrainedModel) -> None:
    prompts = random_prompts([4, 6, 3, 11])
    answers = [greedy_reference(model, prompt, 20) for prompt in prompts]
    for num_right in ([0, 2, 3, 5], [0, 1, 0, 4], [0, 0, 0, 0]):
        decoder = build_decoder(
            ModelRunner(model, 4, 40),
            num_slots=4,
            drafter=Oracle(answers, num_right, [0, 2, 3, 5]),
            draft_length=5,
        )
        steps = list(decoder.generate(requests_for(prompts, 20)))
        assert collect(steps) == dict(enumerate(answers))
        assert steps[1].drafted == (0, 2, 3, 5)
        assert steps[1].accepted == tuple(num_right)


def test_s20_draft_lengths_0_2_3_5_in_one_step(model: PreTrainedModel) -> None:
    check_s20(model)


def test_s21_the_prompt_is_prefilled_once(model: PreTrainedModel) -> None:
    """The cache is rolled back, never reset: target positions computed are exactly those of the blocks."""
    [prompt] = random_prompts([30])
    answer = greedy_reference(model, prompt, 13)
    for num_right, per_step in ((0, 1), (2, 3), (3, 4)):
        runner = RecordingRunner(model, 1, 50)
        decoder = build_decoder(
            runner, num_slots=1, drafter=Oracle([answer], [num_right], [3]), draft_length=3
        )
        steps = list(decoder.generate([Request(0, tuple(prompt), 13)]))
        assert len(steps) == 1 + 12 // per_step
        drafted = sum(len(logits[0]) - 1 for logits in runner.verified)
        plain = sum(step.phase == Phase.DECODE for step in steps)
        assert runner.num_tokens == {
            Phase.PREFILL: 30,
            Phase.DECODE: plain,
            Phase.VERIFY: len(steps) - 1 - plain + drafted,
        }
        assert plain <= 1  # the last token has no room for a draft


def test_s22_pad_id_equal_to_stop_id() -> None:
    """Token 0 pads ragged passes, stops answers, is the model's pad id, and stands in the prompts."""
    model = tiny_model("llama", seed=3, pad_token_id=0, eos_token_id=0)
    prompts = [[5, 0, 7], [0] * 9, [1, 2, 0], random_prompts([12])[0]]
    expected = [greedy_reference(model, prompt, 15, [0]) for prompt in prompts]
    for drafter in (None, model, tiny_model("llama", seed=4), PromptLookupOptions()):
        assert generate(model, prompts, drafter=drafter, max_new_tokens=15) == expected
    unstopped = [greedy_reference(model, prompt, 15) for prompt in prompts]
    assert generate(model, prompts, drafter=model, max_new_tokens=15, stop_token_ids=()) == unstopped


def test_m08_a_second_run_reuses_nothing(model: PreTrainedModel) -> None:
    """The same prompt twice through one decoder: prefilled twice, in full."""
    [prompt] = random_prompts([30])
    runner = RecordingRunner(model, 1, 40)
    decoder = build_decoder(runner, num_slots=1, drafter=PromptLookupDrafter(1, 3, CPU))
    first = collect(decoder.generate([Request(0, tuple(prompt), 9)]))
    after_one = dict(runner.num_tokens)
    assert collect(decoder.generate([Request(0, tuple(prompt), 9)])) == first
    assert runner.num_tokens == {phase: 2 * count for phase, count in after_one.items()}
    assert runner.num_tokens[Phase.PREFILL] == 60


def test_q11_the_longest_prompt_stops_first(model: PreTrainedModel) -> None:
    """A finished row's slot goes to another row; the others are unchanged."""
    prompts = random_prompts([30, 4, 9])
    expected = {
        i: greedy_reference(model, prompt, limit)
        for i, (prompt, limit) in enumerate(zip(prompts, [2, 20, 15], strict=True))
    }
    for drafter in (None, model_drafter(model, 3, 40), model_drafter(tiny_model("llama", seed=9), 3, 40)):
        decoder = build_decoder(ModelRunner(model, 3, 40), num_slots=3, drafter=drafter)
        assert collect(decoder.generate(requests_for(prompts, [2, 20, 15]))) == expected


# Broken engines: each check above can fail


def lose_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling back forgets nothing: positions run on after a rejection."""
    monkeypatch.setattr(KVCache, "roll_back", lambda self, lengths: None)


def look_one_position_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask lets each query see one position too many."""
    right = PassLayout.additive_mask

    def additive_mask(self: PassLayout, dtype: torch.dtype, repeats: int, window: int | None) -> Tensor:
        mask = right(self, dtype, repeats, window)
        return torch.cat([torch.zeros_like(mask[..., :1]), mask[..., :-1]], -1)

    monkeypatch.setattr(PassLayout, "additive_mask", additive_mask)


def pad_into_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is written over the row's first token instead of the spare slot."""
    right = PassLayout.positions.func  # type: ignore[attr-defined]

    def positions(self: PassLayout) -> Tensor:
        found = right(self)
        return torch.where(found == self.capacity, 0, found)

    monkeypatch.setattr(PassLayout, "positions", property(positions))


def ignore_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last token of a step is compared with the stop tokens."""

    def first_end(self: StopTokens, token_ids: Sequence[int], start: int) -> int | None:
        return len(token_ids) if token_ids[-1] in self.token_ids else None

    monkeypatch.setattr(StopTokens, "first_end", first_end)


def forget_the_last_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter takes the newest token for the only one it lacks, so full acceptance leaves a hole."""

    def catch_up(self: DraftModelDrafter, rows: Sequence[Row], wanted: Sequence[bool]) -> Tensor:
        tokens = torch.tensor([[row.token_ids[-1]] for row in rows])
        return self.runner.decode(tokens, [int(w) for w in wanted])

    monkeypatch.setattr(DraftModelDrafter, "_catch_up", catch_up)


def accept_softly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that lets one wrong token through."""
    right = TokenVerifier.verify

    def verify(self: TokenVerifier, proposal: DraftProposal, target: Law, draws: BlockDraws) -> Verification:
        verdict = right(self, proposal, target, draws)
        pairs = zip(verdict.accepted, proposal.lengths, strict=True)
        return replace(verdict, accepted=tuple(min(a + 1, n) for a, n in pairs))

    monkeypatch.setattr(TokenVerifier, "verify", verify)


def count_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens are counted before the text is cut at its stop."""
    right = Progress.commit

    def commit(
        self: Progress,
        phase: Phase,
        rows: Sequence[Row],
        proposed: Sequence[Sequence[int]],
        drafted: Sequence[int] | None = None,
    ) -> StepOutput:
        step = right(self, phase, rows, proposed, drafted)
        return replace(step, accepted=tuple(len(tokens) - 1 for tokens in proposed))

    monkeypatch.setattr(Progress, "commit", commit)


BREAKS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[PreTrainedModel], None]]] = [
    (lose_the_position, check_s05),
    (lose_the_position, check_s18),
    (look_one_position_ahead, check_s05),
    (look_one_position_ahead, check_s18),
    (look_one_position_ahead, check_s20),
    (pad_into_the_row, check_s20),
    (ignore_stops, check_s01),
    (accept_softly, check_s05),
    (accept_softly, check_s18),
    (count_what_was_cut, lambda model: check_s06()),
    (forget_the_last_accepted, lambda model: check_s07(model, 0.0, 3)),
    (forget_the_last_accepted, lambda model: check_s07(model, 1.0, 3)),
]


@pytest.mark.parametrize(("broken", "check"), BREAKS)
def test_the_check_sees_the_broken_engine(
    broken: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[PreTrainedModel], None],
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(model)
    broken(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check(model)


@pytest.fixture
def shared_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(self: BlockDraws, purpose: Purpose, offset: int) -> Keys:
        return Keys(Purpose.DRAFT, self.request_ids, self.starts, torch.full_like(self.starts, offset))

    monkeypatch.setattr(BlockDraws, "_block_keys", keys)


def test_the_law_cases_see_a_shared_uniform(shared_uniforms: None) -> None:
    with pytest.raises(AssertionError):
        test_s13_one_draft_token_has_the_exact_law()


def test_the_law_cases_see_a_soft_law_of_an_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4's fault: the draft takes its argmax and reports the softmax."""

    def law(self: Sampler, logits: Tensor, *_: object) -> Law:
        return Law(probs=torch.softmax(logits, -1))

    def draft(self: BlockDraws, law: Law, offset: int) -> Tensor:
        assert law.probs is not None
        return law.probs.argmax(-1)

    monkeypatch.setattr(Sampler, "law", law)
    monkeypatch.setattr(BlockDraws, "draft", draft)
    with pytest.raises(AssertionError):
        test_s04_greedy_draft_under_a_sampling_target()
