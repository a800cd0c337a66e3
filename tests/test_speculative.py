"""Speculative == autoregressive == transformers' greedy generate, over random configurations in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from toy_engine import (
    CPU,
    ToyRunner,
    build_decoder,
    chain,
    collect,
    model_drafter,
    requests_for,
    script,
    toy_drafter,
)
from toy_models import (
    FAMILIES,
    UNIFORM_FAMILIES,
    VOCAB_SIZE,
    greedy_reference,
    random_prompts,
    tiny_model,
)
from transformers import PreTrainedModel

from quant.kv.per_token import PerTokenOptions
from quant.kv.sealed_groups import SealedGroupsOptions
from specdec import ModelRunner
from specdec.decoding.base import DecodingParts
from specdec.decoding.no_cache import NoCacheDecoder
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.base import DraftLength
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter, DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelOptions
from specdec.drafters.fallback import FallbackOptions
from specdec.drafters.layer_skip import LayerSkipOptions
from specdec.drafters.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from specdec.drafters.suffix import SuffixOptions
from specdec.draws import BlockDraws, KeyedDraws
from specdec.kv_cache import CacheShape, KVStore
from specdec.kv_stores.dense import DenseStore
from specdec.progress import Row, StopTokens, Vacancy
from specdec.sampling import Sampler
from specdec.types import DraftProposal, GoOn, Phase, Prospect, SamplingParams, StepOutput, Verification
from specdec.verifiers.base import Verifier
from specdec.verifiers.match import MatchVerifier

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams()
DRAFTERS = (
    *("same", "similar", "unrelated", "bad", "prompt_lookup", "suffix", "fallback", "layer_skip"),
    # Draft models that go on from the target's cache.
    *("shared_similar", "shared_bad", "shared_fallback"),
)


@cache
def target_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


@cache
def draft_model(family: str, kind: str) -> PreTrainedModel:
    """From always accepted to never: the target, the target with noise, another model, the target's opposite."""
    if kind == "same":
        return target_model(family)
    if kind == "unrelated":
        return tiny_model(FAMILIES[FAMILIES.index(family) - 1], seed=1)
    model = copy.deepcopy(target_model(family))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if kind == "bad":
            model.get_output_embeddings().weight.neg_()
        else:
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.add_(0.03 * noise * weight.std())
    return model


@dataclass(frozen=True)
class Configuration:
    family: str
    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    num_slots: int
    drafter: str
    draft_length: int
    prefill_chunk: int | None
    stop_ids: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    ragged: bool = False

    @property
    def capacity(self) -> int:
        return max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True))


def random_configuration(seed: int) -> Configuration:
    """Half of the prompts repeat a phrase; stop tokens are taken from the answers, so they fall anywhere in a block."""
    choose = random.Random(seed)
    family = choose.choice(FAMILIES)
    batch = choose.randint(1, 5)
    prompts = random_prompts([choose.choice([1, 2, 3, 5, 8, 13, 17]) for _ in range(batch)], seed)
    prompts = [prompt * choose.choice([1, 2]) for prompt in prompts]
    limits = [choose.choice([1, 2, 3, 7, 12, 18]) for _ in prompts]
    stop_ids: list[int] = []
    for _ in range(choose.choice([0, 0, 1, 2])):
        index = choose.randrange(batch)
        answer = greedy_reference(target_model(family), prompts[index], limits[index])
        stop_ids.append(choose.choice(answer))
    drafters = [name for name in DRAFTERS if name != "layer_skip" or family in UNIFORM_FAMILIES]
    return Configuration(
        family,
        tuple(map(tuple, prompts)),
        tuple(limits),
        choose.randint(1, batch),
        choose.choice(drafters),
        choose.randint(1, 8),
        choose.choice([None, None, 4]),
        tuple(stop_ids),
        random_sampling(choose, stop_ids),
        choose.random() < 0.3,
    )


def random_sampling(choose: random.Random, stop_ids: Sequence[int]) -> SamplingParams:
    """Greedy, in half of the cases with penalties, biases or bans."""
    if choose.random() < 0.5:
        return SamplingParams()
    word = tuple(choose.randrange(VOCAB_SIZE) for _ in range(choose.choice([1, 2])))
    if word[0] in stop_ids:  # transformers lets a bad word be that is a stop token
        word = (*word, 0)
    return SamplingParams(
        repetition_penalty=choose.choice([1.0, 1.3, 5.0]),
        bad_words=choose.choice([(), (word,)]),
        min_new_tokens=choose.choice([0, 3]),
        logit_bias=choose.choice([(), ((choose.randrange(VOCAB_SIZE), 4.0),)]),
    )


class RaggedLengths(DraftLength):
    """Each row and step has a length of its own, from nothing to the most."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        return [(len(row.token_ids) * 5 + row.request.request_id) % (self.num_tokens + 1) for row in rows]


def drafter_of(config: Configuration, sampler: Sampler, target_runner: ModelRunner) -> Drafter:
    options: dict[str, DrafterOptions] = {
        "prompt_lookup": PromptLookupOptions(),
        "suffix": SuffixOptions(),
        "fallback": FallbackOptions(),
        "layer_skip": LayerSkipOptions(1),
    }
    target = target_model(config.family)
    name = config.drafter.removeprefix("shared_")
    draft = "similar" if name in options else name
    context = DrafterContext(
        config.num_slots,
        config.capacity,
        VOCAB_SIZE,
        CPU,
        sampler,
        target,
        lambda weights: draft_model(config.family, draft),
        target_runner.cache,
        draft_is_target=config.drafter.startswith("shared_"),
    )
    return options.get(name, DraftModelOptions()).build(context)


def run(
    config: Configuration,
    speculative: bool,
    verifier: Verifier | None = None,
    seed: int = 0,
    make_store: Callable[[CacheShape], KVStore] = DenseStore,
) -> list[StepOutput]:
    runner = ModelRunner(
        target_model(config.family),
        config.num_slots,
        config.capacity,
        prefill_chunk=config.prefill_chunk,
        longest_pass=config.draft_length + 1 if speculative else 1,
        make_store=make_store,
    )
    sampler = Sampler(config.sampling, config.stop_ids)
    length: int | DraftLength = config.draft_length
    decoder = build_decoder(
        runner,
        num_slots=config.num_slots,
        drafter=drafter_of(config, Sampler(config.sampling, config.stop_ids), runner)
        if speculative
        else None,
        draft_length=RaggedLengths(config.draft_length) if config.ragged else length,
        verifier=verifier,
        sampler=sampler,
        stop_ids=config.stop_ids,
        seed=seed,
    )
    steps = list(decoder.generate(requests_for(config.prompts, config.limits)))
    assert set(runner.lengths) == {0}
    return steps


def check(config: Configuration) -> None:
    model = target_model(config.family)
    stop_ids = list(config.stop_ids) or None
    reference = {
        i: greedy_reference(model, list(prompt), limit, stop_ids, config.sampling)
        for i, (prompt, limit) in enumerate(zip(config.prompts, config.limits, strict=True))
    }
    assert collect(run(config, speculative=False)) == reference
    steps = run(config, speculative=True)
    assert collect(steps) == reference
    for step in steps:
        for committed, drafted, accepted in zip(step.committed, step.drafted, step.accepted, strict=True):
            assert len(committed) == accepted + 1
            assert 0 <= accepted <= drafted <= config.draft_length
            if config.drafter == "same" and step.phase == Phase.VERIFY:
                assert accepted == drafted


def check_sampled(config: Configuration) -> None:
    """With `match` a sampled text is the baseline's for the seed, token for token."""
    cuts: dict[str, Any] = random.Random(hash(config.prompts)).choice(
        [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.7}, {"presence_penalty": 0.7}]
    )
    sampled = replace(config, sampling=replace(config.sampling, temperature=0.9, **cuts))
    assert collect(run(sampled, True, MatchVerifier(), seed=3)) == collect(run(sampled, False, seed=3))


@pytest.mark.parametrize("seed", range(60))
def test_speculative_equals_autoregressive_equals_transformers(seed: int) -> None:
    check(random_configuration(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_more_random_configurations(seed: int) -> None:
    check(random_configuration(seed))


@pytest.mark.parametrize("seed", range(20))
def test_matched_samples_are_the_baselines(seed: int) -> None:
    check_sampled(random_configuration(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_more_matched_samples(seed: int) -> None:
    check_sampled(random_configuration(seed))


def quantized_store(config: Configuration, seed: int) -> PerTokenOptions | SealedGroupsOptions:
    """Blocks small enough that a text of some tens of tokens seals several, with a tail as short as may be."""
    choose = random.Random(-seed)
    key_bits, value_bits = choose.choice([2, 4, 8]), choose.choice([2, 4, 8])
    group = choose.choice([0, 4])
    if choose.random() < 0.3:
        return PerTokenOptions(key_bits, value_bits, group)
    tail = config.draft_length + 1 + choose.choice([0, 0, 3])
    return SealedGroupsOptions(
        key_bits, value_bits, group, choose.choice([1, 4, 7]), tail, choose.choice([0, 2])
    )


def check_over_quantized_kv(seed: int) -> None:
    """Speculation equals its twin over the same store, whatever the chunks; so does decoding without a cache."""
    config = random_configuration(seed)
    build = quantized_store(config, seed).build
    twin = collect(run(replace(config, prefill_chunk=None), speculative=False, make_store=build))
    chunks = replace(config, prefill_chunk=3)
    assert collect(run(config, speculative=True, make_store=build)) == twin
    assert collect(run(chunks, speculative=True, make_store=build)) == twin
    no_cache = NoCacheDecoder(
        DecodingParts(
            ModelRunner(target_model(config.family), config.num_slots, config.capacity, make_store=build),
            Sampler(config.sampling, config.stop_ids),
            KeyedDraws(0),
            StopTokens(config.stop_ids),
            config.num_slots,
        )
    )
    assert collect(no_cache.generate(requests_for(config.prompts, config.limits))) == twin


@pytest.mark.parametrize("seed", range(40))
def test_over_quantized_kv_speculative_equals_its_twin(seed: int) -> None:
    check_over_quantized_kv(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_over_quantized_kv_more_random_configurations(seed: int) -> None:
    check_over_quantized_kv(seed)


@pytest.mark.parametrize("seed", range(10))
def test_over_quantized_kv_matched_samples_are_the_twins(seed: int) -> None:
    config = random_configuration(seed)
    sampled = replace(config, sampling=replace(config.sampling, temperature=0.9))
    build = quantized_store(config, seed).build
    speculative = run(sampled, True, MatchVerifier(), seed=3, make_store=build)
    assert collect(speculative) == collect(run(sampled, False, seed=3, make_store=build))


def test_quantized_kv_changes_some_texts() -> None:
    """Else the tests above would show nothing."""
    configs = [random_configuration(seed) for seed in range(40)]
    changed = [
        collect(run(config, False, make_store=quantized_store(config, seed).build))
        != collect(run(config, False))
        for seed, config in enumerate(configs)
    ]
    assert sum(changed) >= 10


def test_the_random_configurations_cover_what_matters() -> None:
    configs = [random_configuration(seed) for seed in range(60)]
    assert {config.family for config in configs} == set(FAMILIES)
    assert {config.drafter for config in configs} == set(DRAFTERS)
    assert {config.draft_length for config in configs} == set(range(1, 9))
    assert any(config.num_slots < len(config.prompts) for config in configs)
    assert any(config.stop_ids for config in configs)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_texts_do_not_depend_on_slots_or_batch_mates(drafter: str) -> None:
    """Draws are keyed by request: alone, in a batch, or waiting for a slot, a request gets the same text."""
    prompts = tuple(tuple(prompt * 2) for prompt in random_prompts([3, 9, 5, 3]))
    texts = []
    for num_slots in (1, 2, 4):
        config = Configuration("llama", prompts, (12, 7, 15, 12), num_slots, drafter, 3, None, ())
        runner = ModelRunner(target_model("llama"), num_slots, config.capacity)
        decoder = build_decoder(
            runner,
            num_slots=num_slots,
            drafter=drafter_of(config, Sampler(SamplingParams(1.0)), runner),
            draft_length=3,
            temperature=1.0,
        )
        texts.append(collect(decoder.generate(requests_for(prompts, config.limits))))
    assert texts[0] == texts[1] == texts[2]


def test_a_sampled_text_with_nothing_drafted_is_the_plain_one() -> None:
    """The target's own samples are keyed by position alone, so without drafts every method writes the same text."""
    prompts = random_prompts([3, 9, 5])
    requests = requests_for(prompts, [12, 7, 15])
    model = target_model("llama")
    plain = build_decoder(ModelRunner(model, 3, 30), num_slots=3, temperature=1.0, seed=4)
    lookup = PromptLookupDrafter(8, 8, CPU)  # no n-gram of 8 tokens comes twice
    speculative = build_decoder(
        ModelRunner(model, 3, 30), num_slots=3, temperature=1.0, seed=4, drafter=lookup
    )
    no_cache = NoCacheDecoder(
        DecodingParts(
            ModelRunner(model, 2, 30), Sampler(SamplingParams(1.0)), KeyedDraws(4), StopTokens(), num_slots=2
        )
    )
    texts = collect(plain.generate(requests))
    assert collect(speculative.generate(requests)) == texts
    assert collect(no_cache.generate(requests)) == texts


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_decoding_equals_cached_decoding(family: str) -> None:
    prompts = random_prompts([3, 9, 5])
    model = target_model(family)
    decoder = NoCacheDecoder(
        DecodingParts(
            ModelRunner(model, 2, 20, prefill_chunk=4),
            Sampler(SamplingParams()),
            KeyedDraws(0),
            StopTokens(),
            2,
        )
    )
    expected = {
        i: greedy_reference(model, prompt, limit)
        for i, (prompt, limit) in enumerate(zip(prompts, [9, 1, 12], strict=True))
    }
    assert collect(decoder.generate(requests_for(prompts, [9, 1, 12]))) == expected


# The loop, on scripted models


def test_one_step_by_hand() -> None:
    """The target writes 1 2 3 4 5 6 ...; the draft agrees on two of four, then on all."""
    target = script([1, 2, 3, 4, 5, 6, 7, 8, 9], 10, prompt_length=2)
    draft = script([1, 2, 3, 0, 5, 6, 7, 8, 9], 10, prompt_length=2)
    runner = ToyRunner(target, 10, 1)
    decoder = build_decoder(runner, num_slots=1, drafter=toy_drafter(draft, 10, 1), draft_length=3)
    steps = list(decoder.generate(requests_for([[0, 0]], 9)))
    assert [step.committed[0] for step in steps] == [(1,), (2, 3, 4), (5, 6, 7, 8), (9,)]
    assert [step.drafted[0] for step in steps] == [0, 3, 3, 0]
    assert [step.accepted[0] for step in steps] == [0, 2, 3, 0]
    assert [step.phase for step in steps] == [Phase.PREFILL, Phase.VERIFY, Phase.VERIFY, Phase.DECODE]
    assert [step.finished[0] for step in steps] == [False, False, False, True]
    assert runner.passes == [
        ("prefill", ((0, 0),)),
        ("verify", ((1, 2, 3, 0),)),
        ("verify", ((4, 5, 6, 7),)),
        ("decode", ((8,),)),
    ]


def test_every_step_leaves_the_cache_one_token_short_of_the_text() -> None:
    table = [[0.1, 0.5, 0.4], [0.6, 0.2, 0.2], [0.3, 0.3, 0.4]]
    runner = ToyRunner(chain(table), 3, 2)
    drafter = toy_drafter(chain(table[::-1]), 3, 2, temperature=1)
    decoder = build_decoder(runner, num_slots=2, drafter=drafter, draft_length=3, temperature=1)
    prompts = [[0, 1], [2]]
    texts = [list(prompt) for prompt in prompts]
    for step in decoder.generate(requests_for(prompts, 30)):
        if any(step.finished):
            break
        for request_id, tokens in zip(step.request_ids, step.committed, strict=True):
            texts[request_id] += tokens
        assert runner.texts == [text[:-1] for text in texts]
        assert isinstance(drafter.runner, ToyRunner)
        for held, text in zip(drafter.runner.texts, texts, strict=True):
            assert held == text[: len(held)]
            assert len(held) in (0, len(text) - 1, len(text) - 2)


def test_rows_that_finish_in_prefill_leave_others_alone() -> None:
    """Limits of 1, and a stop as first token, among longer ones, in two slots."""
    model = target_model("llama")
    prompts = random_prompts([3, 9, 5, 4, 7])
    limits = [1, 9, 1, 1, 6]
    expected = {
        i: greedy_reference(model, prompt, limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    }
    for drafter in (None, model_drafter(draft_model("llama", "similar"), 2, 20)):
        decoder = build_decoder(ModelRunner(model, 2, 20), num_slots=2, drafter=drafter)
        assert collect(decoder.generate(requests_for(prompts, limits))) == expected
    first = expected[0][0]
    decoder = build_decoder(
        ModelRunner(model, 2, 20), num_slots=2, drafter=PromptLookupDrafter(1, 3, CPU), stop_ids=[first]
    )
    stopped = collect(decoder.generate(requests_for(prompts, 9)))
    assert stopped[0] == [first]
    for i, prompt in enumerate(prompts):
        assert stopped[i] == greedy_reference(model, prompt, 9, [first])


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_generator_that_was_closed_early_leaves_nothing_behind(num_steps: int) -> None:
    model = target_model("llama")
    prompts = random_prompts([3, 9, 5])
    runner = ModelRunner(model, 2, 20)
    drafter = model_drafter(draft_model("llama", "similar"), 2, 20)
    decoder = build_decoder(runner, num_slots=2, drafter=drafter)
    steps = decoder.generate(requests_for(prompts, 9))
    for _ in range(num_steps):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert set(runner.lengths) == set(drafter.runner.lengths) == {0}
    expected = {i: greedy_reference(model, prompt, 9) for i, prompt in enumerate(prompts)}
    assert collect(decoder.generate(requests_for(prompts, 9))) == expected


def test_two_generators_of_one_decoder_are_refused() -> None:
    decoder = build_decoder(ModelRunner(target_model("llama"), 1, 20), num_slots=1)
    first = decoder.generate(requests_for([[1, 2]], 9))
    next(first)
    with pytest.raises(ValueError, match="slot 0 holds 2 tokens"):
        next(decoder.generate(requests_for([[3, 4]], 9)))


def test_no_requests() -> None:
    decoder = build_decoder(ModelRunner(target_model("llama"), 1, 20), num_slots=1)
    assert list(decoder.generate([])) == []


def test_speculation_needs_its_parts() -> None:
    parts = DecodingParts(
        ToyRunner(chain([[1.0]]), 1, 1), Sampler(SamplingParams()), KeyedDraws(0), StopTokens(), 1
    )
    with pytest.raises(ValueError, match="drafter, a verifier and a draft length"):
        SpeculativeDecoder(parts)


@pytest.mark.parametrize("draft_length", [1, 7, 40])
def test_blocks_up_to_the_end_of_the_context(draft_length: int) -> None:
    """Prompt and answer fill the model's context exactly, beside a shorter row whose padding would lie beyond it."""
    model = target_model("llama")
    prompts = random_prompts([100, 60])
    expected = {i: greedy_reference(model, prompt, 28) for i, prompt in enumerate(prompts)}
    for kind in ("same", "similar"):
        decoder = build_decoder(
            ModelRunner(model, 2, 128),
            num_slots=2,
            drafter=model_drafter(draft_model("llama", kind), 2, 128),
            draft_length=draft_length,
        )
        assert collect(decoder.generate(requests_for(prompts, 28))) == expected


def test_bfloat16_writes_a_text_that_is_greedy_up_to_rounding() -> None:
    """Passes of other shapes round differently, so bits may differ; each token is within rounding of the best."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    draft = tiny_model("llama", seed=1, dtype=torch.bfloat16)
    prompts = random_prompts([3, 9, 5])
    wide = copy.deepcopy(model).double()
    for drafter in (PromptLookupDrafter(1, 3, CPU), model_drafter(model, 3, 40), model_drafter(draft, 3, 40)):
        decoder = build_decoder(ModelRunner(model, 3, 40), num_slots=3, drafter=drafter)
        for index, answer in collect(decoder.generate(requests_for(prompts, 20))).items():
            with torch.no_grad():
                logits = wide(torch.tensor([[*prompts[index], *answer]])).logits[
                    0, len(prompts[index]) - 1 : -1
                ]
            margin = logits.amax(-1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
            assert margin.max() < 0.05 * logits.std()


def test_a_draft_model_of_another_dtype() -> None:
    """float32 drafts for a float64 target: greedy is the target's; sampled, nearly all is accepted."""
    model = target_model("llama")
    narrow = copy.deepcopy(model).float()
    prompts = random_prompts([3, 9, 5])
    expected = {i: greedy_reference(model, prompt, 20) for i, prompt in enumerate(prompts)}
    decoder = build_decoder(ModelRunner(model, 3, 40), num_slots=3, drafter=model_drafter(narrow, 3, 40))
    assert collect(decoder.generate(requests_for(prompts, 20))) == expected
    decoder = build_decoder(
        ModelRunner(model, 3, 40), num_slots=3, temperature=1.0, drafter=model_drafter(narrow, 3, 40, 1.0)
    )
    steps = list(decoder.generate(requests_for(prompts, 20)))
    assert sum(map(sum, (step.accepted for step in steps))) == sum(map(sum, (step.drafted for step in steps)))


class DraftsNowAndThen(FixedDraftLength):
    """Nothing for four steps, then a block: the draft model has a long way to catch up."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.step = 0

    def limits(self, rows: Sequence[Row], prospects: Sequence[Prospect]) -> Sequence[int]:
        self.step += 1
        return [self.num_tokens if (self.step + row.request.request_id) % 5 == 0 else 0 for row in rows]


@pytest.mark.parametrize("kind", ["same", "similar", "bad"])
def test_a_draft_model_that_is_asked_now_and_then(kind: str) -> None:
    model = target_model("llama")
    prompts = random_prompts([3, 9, 5, 7])
    limits = [30, 25, 9, 20]
    expected = {i: greedy_reference(model, prompt, limits[i]) for i, prompt in enumerate(prompts)}
    decoder = build_decoder(
        ModelRunner(model, 3, 40),
        num_slots=3,
        drafter=model_drafter(draft_model("llama", kind), 3, 40),
        draft_length=DraftsNowAndThen(4),
    )
    steps = list(decoder.generate(requests_for(prompts, limits)))
    assert collect(steps) == expected
    drafted = sum(map(sum, (step.drafted for step in steps)))
    accepted = sum(map(sum, (step.accepted for step in steps)))
    assert drafted > 0
    assert accepted == {"same": drafted, "bad": 0}.get(kind, accepted)


def test_a_failing_step_leaves_a_runner_that_works() -> None:
    class Fails(PromptLookupDrafter):
        def propose(
            self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
        ) -> DraftProposal:
            if len(rows[0].token_ids) > 8:
                raise MemoryError
            return super().propose(rows, limits, go_on, draws)

    model = target_model("llama")
    runner = ModelRunner(model, 1, 20)
    decoder = build_decoder(runner, num_slots=1, drafter=Fails(1, 3, CPU))
    with pytest.raises(MemoryError):
        list(decoder.generate(requests_for([[1, 2, 3]], 9)))
    assert runner.lengths == (0,)


@pytest.mark.parametrize("drafter", ["shared_similar", "shared_fallback", "layer_skip"])
@pytest.mark.parametrize("num_passes", [0, 3, 7])
def test_a_draft_that_fails_on_the_targets_cache_leaves_nothing_behind(drafter: str, num_passes: int) -> None:
    """While other rows are ahead, and before or after the pass was noted."""
    prompts = tuple(map(tuple, random_prompts([1, 9, 5, 3])))
    config = Configuration("llama", prompts, (9, 3, 7, 9), 3, drafter, 4, None, (), ragged=True)
    runner = ModelRunner(target_model("llama"), 3, config.capacity, pass_tokens=8)
    built: Any = drafter_of(config, Sampler(GREEDY), runner)
    draft_runner, decode, passes = built.runner, built.runner.decode, 0

    def fails(*arguments: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes > num_passes:
            if num_passes % 2:
                decode(*arguments)
            raise MemoryError
        return decode(*arguments)

    decoder = build_decoder(runner, num_slots=3, drafter=built, draft_length=RaggedLengths(4))
    requests = requests_for(prompts, config.limits)
    draft_runner.decode = fails
    with pytest.raises(MemoryError):
        list(decoder.generate(requests))
    assert runner.lengths == draft_runner.lengths == (0, 0, 0)
    del draft_runner.decode
    assert collect(decoder.generate(requests)) == collect(run(config, speculative=False))


def test_the_law_of_a_sampled_run_is_reported_in_float32_for_a_bfloat16_model() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    law = Sampler(SamplingParams(1.0)).law(ModelRunner(model, 1, 4).prefill([[1, 2]], [0]), [])
    assert law.probs is not None
    assert law.probs.dtype == torch.float32


# --- which tokens were drafts


class Noting(Drafter):
    """Passes everything on, and notes of each step how many tokens were drafted and what the verifier said."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.steps: list[tuple[int, int]] = []
        self.drafted = 0

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: GoOn, draws: BlockDraws
    ) -> DraftProposal:
        proposal = self.drafter.propose(rows, limits, go_on, draws)
        self.drafted = proposal.lengths[0]
        return proposal

    def accept(self, rows: Sequence[Row], verification: Verification) -> None:
        self.steps.append((self.drafted, verification.accepted[0]))
        self.drafter.accept(rows, verification)

    def vacate(self, vacancy: Vacancy) -> None:
        self.drafter.vacate(vacancy)


def kinds_of(drafted: int, accepted: int) -> list[str]:
    own = "recovered" if accepted < drafted else "bonus" if drafted else "plain"
    return ["accepted"] * accepted + [own]


def test_kinds_of_tokens_are_what_the_verifier_decided() -> None:
    """Also of answers that stop within their drafts, and of a last step that drafts nothing."""
    target = chain([[0.1, 0.6, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1], [0.3, 0.3, 0.3, 0.1], [0.25] * 4])
    draft = chain([[0.2, 0.4, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1], [0.3, 0.2, 0.3, 0.2], [0.25] * 4])
    found: set[str] = set()
    ends_in_drafts = 0
    for seed in range(60):
        drafter = Noting(toy_drafter(draft, 4, 1, temperature=1.0))
        decoder = build_decoder(
            ToyRunner(target, 4, 1), num_slots=1, drafter=drafter, temperature=1.0, seed=seed, stop_ids=[3]
        )
        first, *steps = decoder.generate(requests_for([[0, 1]], 8))
        assert first.kinds(0) == ("plain",)
        for step, (drafted, accepted) in zip(steps, drafter.steps, strict=True):
            decided, kinds = kinds_of(drafted, accepted), step.kinds(0)
            assert list(kinds) == decided[: len(kinds)]
            assert len(kinds) == len(step.committed[0])
            found.update(kinds)
            ends_in_drafts += len(kinds) < len(decided)
    assert found == {"accepted", "recovered", "bonus", "plain"}
    assert ends_in_drafts > 5
