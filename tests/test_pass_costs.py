"""Measured pass costs: to the tick on a simulated clock, and what is left behind is empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_clock import DECODE_S, OVERHEAD_S, PREFILL_S_PER_TOKEN, VERIFY_S, Clock, SimulatedRunner
from toy_engine import CPU, ToyRunner, build_decoder, collect, model_drafter, requests_for
from toy_folders import repeating_prompts, save_model
from toy_models import VOCAB_SIZE, random_prompts, tiny_model

from experiments import pass_costs
from experiments.config import ModelConfig, compose_run
from experiments.models import ModelPool
from experiments.pass_costs import CONTEXT, TRIES, measure_costs
from experiments.strategy import EngineSettings, arms_of, build_parts
from specdec.costs import PassCosts
from specdec.decoding.base import DecodingParts
from specdec.draft_length.cost_model import CostModelDraftLength
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.fallback import FallbackDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.draws import BlockDraws, KeyedDraws
from specdec.progress import Row, StopTokens
from specdec.runner import ModelRunner, Runner
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 16
ENOUGH = 200
DRAFT_SCALE = 0.25


def counting(text: Sequence[int]) -> list[float]:
    return [float(token == (text[-1] + 1) % VOCAB) for token in range(VOCAB)]


def parts_of(runner: Runner, drafter: Drafter, num_slots: int = 1) -> DecodingParts:
    return DecodingParts(
        runner, Sampler(SamplingParams()), KeyedDraws(0), StopTokens(), num_slots, drafter=drafter
    )


def simulated(clock: Clock, num_slots: int = 1) -> tuple[SimulatedRunner, SimulatedRunner, DecodingParts]:
    """Target and draft model, and the parts with both."""
    runner = SimulatedRunner(counting, VOCAB, num_slots, clock)
    draft = SimulatedRunner(counting, VOCAB, num_slots, clock, DRAFT_SCALE)
    return runner, draft, parts_of(runner, DraftModelDrafter(draft, Sampler(SamplingParams())), num_slots)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_costs_are_those_of_the_clock(num_slots: int) -> None:
    clock = Clock()
    runner, draft, parts = simulated(clock, num_slots)
    decode_ms, verify_ms = 1e3 * (DECODE_S + OVERHEAD_S), 1e3 * (VERIFY_S + OVERHEAD_S)
    draft_ms = 1e3 * DRAFT_SCALE * DECODE_S  # a pass per draft token, the prompt having been read before
    assert measure_costs(parts, 3, ENOUGH, clock) == PassCosts(
        target=(decode_ms, verify_ms, verify_ms, verify_ms),
        draft={"": (0.0, draft_ms, 2 * draft_ms, 3 * draft_ms)},
        unread_token=1e3 * DRAFT_SCALE * PREFILL_S_PER_TOKEN,
    )
    assert runner.lengths == draft.lengths == (0,) * num_slots


def test_every_pass_reads_what_it_says() -> None:
    runner, draft, parts = simulated(Clock())
    measure_costs(parts, 2, ENOUGH)
    (_, (prompt,)), *later = runner.passes
    assert len(prompt) == CONTEXT - 1
    assert [(verb, len(tokens[0])) for verb, tokens in later] == [
        *[("decode", 1)] * (TRIES + 1),
        *[("verify", 2)] * (TRIES + 1),
        *[("verify", 3)] * (TRIES + 1),
        ("prefill", VOCAB - 1),  # the text that does not repeat itself
    ]
    (_, (read,)), *drafted = draft.passes
    assert read == prompt
    # The newest token is read in each proposal, as between two steps of a text; then all of it, for the first one.
    assert [verb for verb, _ in drafted] == [
        *["decode"] * (TRIES + 1) * (1 + 2),
        *["prefill", "decode"] * (TRIES + 1),
    ]
    assert {len(tokens[0]) for verb, tokens in drafted if verb == "decode"} == {1}
    assert {tokens for verb, tokens in drafted if verb == "prefill"} == {(prompt,)}


def test_a_drafter_that_copies_or_asks_a_model_has_costs_of_both() -> None:
    clock = Clock()
    runner, draft, parts = simulated(clock)
    assert isinstance(parts.drafter, DraftModelDrafter)
    fallback = FallbackDrafter(PromptLookupDrafter(2, 4, CPU), parts.drafter, min_copied=2)
    found = measure_costs(replace(parts, drafter=fallback), 2, ENOUGH, clock)
    draft_ms = 1e3 * DRAFT_SCALE * DECODE_S
    assert found.draft == {"copy": (0.0, 0.0, 0.0), "": (0.0, draft_ms, 2 * draft_ms)}
    assert found.unread_token == 1e3 * DRAFT_SCALE * PREFILL_S_PER_TOKEN
    assert runner.lengths == draft.lengths == (0,)


def test_the_first_pass_and_a_slow_one_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    times = iter([9.0, 1.0, 1.0, 5.0, 1.0, 2.0])

    def work() -> None:
        clock.now += next(times)

    assert pass_costs._median_ms(work, clock) == 1000.0
    assert next(times, None) is None


class Noting(PromptLookupDrafter):
    """Keeps the lengths of its proposals."""

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        proposal = super().propose(rows, limits, go_on, draws)
        self.lengths = [*getattr(self, "lengths", []), *proposal.lengths]
        return proposal


def test_a_copying_drafter_finds_something_to_copy() -> None:
    drafter = Noting(1, 3, CPU)
    clock = Clock()
    found = measure_costs(parts_of(SimulatedRunner(counting, VOCAB, 1, clock), drafter), 4, ENOUGH, clock)
    assert found.draft == {"": (0.0,) * 5}
    assert drafter.lengths == [length for length in range(5) for _ in range(TRIES + 1)]


def test_the_text_has_only_tokens_of_the_model() -> None:
    size = 8
    runner = ToyRunner(lambda text: [1 / size] * size, size, 1)
    measure_costs(parts_of(runner, PromptLookupDrafter(1, 3, CPU)), 2, ENOUGH)
    read = [token for _, rows in runner.passes for tokens in rows for token in tokens]
    assert set(read) == set(range(size))
    model = tiny_model(vocab_size=size)  # its embedding has no others
    runner_and_drafter = ModelRunner(model, 1, 80), model_drafter(model, 1, 80)
    assert min(measure_costs(parts_of(*runner_and_drafter), 2, 80).target) > 0


@pytest.mark.parametrize("pass_tokens", [None, 8])
@pytest.mark.parametrize(
    ("capacity", "num_drafted", "length", "most"),
    [
        (100, 4, CONTEXT, 4),
        (68, 4, 64, 4),
        (67, 4, 63, 4),
        (10, 4, 6, 4),
        (6, 4, 2, 4),
        (5, 4, 2, 3),
        (2, 4, 2, 0),
    ],
)
def test_a_small_cache_holds_the_text(
    capacity: int, num_drafted: int, length: int, most: int, pass_tokens: int | None
) -> None:
    runner = ModelRunner(tiny_model(seed=0), 2, capacity, pass_tokens=pass_tokens)
    drafter = model_drafter(tiny_model(seed=1), 2, capacity)
    reads: list[int] = []
    prefill = runner.prefill

    def noting(prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> torch.Tensor:
        reads.extend(map(len, prompts))
        return prefill(prompts, slots)

    runner.prefill = noting  # type: ignore[method-assign]
    found = measure_costs(parts_of(runner, drafter, 2), num_drafted, capacity)
    assert reads == [length - 1, min(length, VOCAB_SIZE) - 1]
    assert (len(found.target), len(found.draft[""])) == (most + 1, most + 1)
    assert min(found.target) > 0
    assert runner.lengths == drafter.runner.lengths == (0, 0)


def test_a_failure_leaves_empty_caches_too() -> None:
    runner, draft, parts = simulated(Clock())

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    draft.decode = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        measure_costs(parts, 2, ENOUGH)
    assert runner.lengths == draft.lengths == (0,)


def test_texts_are_the_same_after_measuring() -> None:
    target, draft = tiny_model(seed=0), tiny_model(seed=1)
    prompts = random_prompts([4, 7])
    texts = []
    for is_measured in (False, True):
        runner, drafter = ModelRunner(target, 2, 80), model_drafter(draft, 2, 80)
        if is_measured:
            measure_costs(parts_of(runner, drafter, 2), 3, 80)
        decoder = build_decoder(runner, num_slots=2, drafter=drafter, draft_length=3)
        texts.append(collect(decoder.generate(requests_for(prompts, 12))))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup", "suffix", "fallback", "layer_skip"])
def test_the_cost_model_gets_measured_costs_whatever_drafts(tmp_path: Path, drafter: str) -> None:
    save_model(tmp_path / "target")
    pool = ModelPool(ModelConfig(str(tmp_path / "target")), torch.float32, torch.device("cpu"))
    weights = ["drafter.weights=plain"] if drafter in ("draft_model", "fallback") else []
    overrides = ["strategy=specdec", f"drafter={drafter}", "draft_length=cost_model", "draft_length.max=3"]
    arms = arms_of(compose_run([*overrides, *weights]))
    settings = EngineSettings(1, 28, SamplingParams(), frozenset(), 0, StopTokens(), None)
    parts = build_parts(arms.strategy, pool, settings)
    assert isinstance(parts.draft_length, CostModelDraftLength)
    costs = parts.draft_length.costs
    assert set(costs.draft) == ({"", "copy"} if drafter == "fallback" else {""})
    assert {len(times) for times in (costs.target, *costs.draft.values())} == {4}
    # None of these has a text to read: the draft is a copy of the target, or none.
    assert costs.unread_token == 0.0
    prompts = repeating_prompts([6])
    found = collect(arms.strategy.decoding.build(parts).generate(requests_for(prompts, 16)))
    twin = arms.twin.decoding.build(build_parts(arms.twin, pool, settings))
    assert found == collect(twin.generate(requests_for(prompts, 16)))


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_know_nothing_of_the_text_that_costs_are_measured_with(tmp_path: Path, shared: bool) -> None:
    save_model(tmp_path / "target")
    pool = ModelPool(ModelConfig(str(tmp_path / "target")), torch.float32, torch.device("cpu"))
    overrides = ["strategy=suffix", f"drafter.shared={shared}", "draft_length=cost_model"]
    settings = EngineSettings(1, 100, SamplingParams(), frozenset(), 0, StopTokens(), None)
    parts = build_parts(arms_of(compose_run(overrides)).strategy, pool, settings)
    assert parts.drafter is not None
    row = Row(Request(0, (30, 3, 4, 5), 8), slot=0)  # its end stands in that text
    draws = BlockDraws.of(parts.draws, [0], [4], CPU)
    proposal = parts.drafter.propose([row], [3], lambda logits, step: [True], draws)
    assert proposal.lengths == (0,)
