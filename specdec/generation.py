"""The engine as one function, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from specdec.decoding.autoregressive import AutoregressiveDecoder
from specdec.decoding.base import Decoder, DecodingParts
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelOptions
from specdec.draws import KeyedDraws
from specdec.processors import Processor
from specdec.progress import StopTokens
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams, StepOutput
from specdec.verifiers.token import TokenVerifier


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: PreTrainedModel | DrafterOptions | None = None,
    draft_length: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    sampling: SamplingParams | None = None,
    processors: Sequence[Processor] = (),
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
    num_slots: int | None = None,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Answer prompts of token ids: the new tokens of each, in the prompts' order.

    With a drafter (a draft model of the same vocabulary, or the options of any drafter, such as
    `PromptLookupOptions()`) decoding is speculative, with the same output: token for token when greedy
    (`temperature=0`), in law otherwise.

    Args:
        sampling: all sampling parameters, in the place of `temperature`.
        processors: applied to the logits behind the built-in ones; see `specdec.user_processors` for transformers'.
        stop_token_ids: an answer ends with the first of them; default: the model's end-of-text ids.
        num_slots: rows decoded together; more prompts wait. Default: all prompts.
        vocab_size: laws are over the first so many tokens: needed where target and draft model have the same tokens,
            but logits that are padded to different widths. Default: the model's own.

    Raises:
        ValueError: an unknown model family, a text beyond the model's context, a draft model of another
            vocabulary, a prompt that is text or a bare number, or a value out of range; the message names it.
    """
    steps = generate_steps(
        model,
        prompts,
        drafter=drafter,
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        sampling=sampling,
        processors=processors,
        seed=seed,
        stop_token_ids=stop_token_ids,
        num_slots=num_slots,
        vocab_size=vocab_size,
    )
    answers: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for request_id, tokens in zip(step.request_ids, step.committed, strict=True):
            answers[request_id].extend(tokens)
    return answers


def generate_steps(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: PreTrainedModel | DrafterOptions | None = None,
    draft_length: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    sampling: SamplingParams | None = None,
    processors: Sequence[Processor] = (),
    seed: int = 0,
    stop_token_ids: Collection[int] | None = None,
    num_slots: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[StepOutput]:
    """Like `generate`, one `StepOutput` per pass of the target; request ids are the prompts' indices."""
    if draft_length < 1:
        raise ValueError(f"draft_length={draft_length}: expected at least 1")
    requests = [Request(i, _token_ids(i, prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
    if not requests:
        return iter(())
    slots = len(requests) if num_slots is None else num_slots
    capacity = max(request.max_length for request in requests)
    if drafter is not None and not isinstance(drafter, DrafterOptions) and vocab_size is None:
        _check_same_width(model, drafter)
    runner = ModelRunner(model, slots, capacity, vocab_size=vocab_size)
    stop_ids = end_of_text_ids(model) if stop_token_ids is None else stop_token_ids
    sampler = Sampler(SamplingParams(temperature) if sampling is None else sampling, stop_ids, processors)
    stop_rule = StopTokens(stop_ids)
    parts = DecodingParts(runner, sampler, KeyedDraws(seed), stop_rule, slots)
    decoder: Decoder
    if drafter is None:
        decoder = AutoregressiveDecoder(parts)
    else:
        options, load = _drafter_options(drafter)
        context = DrafterContext(
            slots, capacity, runner.vocab_size, runner.device, sampler, model, load, runner.cache
        )
        decoder = SpeculativeDecoder(
            replace(
                parts,
                drafter=options.build(context),
                verifier=TokenVerifier(),
                draft_length=FixedDraftLength(draft_length),
            )
        )
    return decoder.generate(requests)


def end_of_text_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer of this model, from its generation configuration; may be empty."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def _token_ids(index: int, prompt: object) -> tuple[int, ...]:
    if isinstance(prompt, (int, str)):
        raise ValueError(
            f"prompt {index} is {prompt!r}: expected a list of prompts, each a list of token ids (tokenize text first)"
        )
    return tuple(prompt)  # type: ignore[arg-type]


def _check_same_width(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Without tokenizers nothing else tells another vocabulary from a padded one."""
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"the draft model has a vocabulary of {theirs} tokens, the target one of {ours}: they must be the same; "
            "where only padding differs, vocab_size says how many tokens both have"
        )


def _drafter_options(
    drafter: PreTrainedModel | DrafterOptions,
) -> tuple[DrafterOptions, Callable[[str], PreTrainedModel]]:
    if isinstance(drafter, DrafterOptions):
        return drafter, _no_draft_model
    return DraftModelOptions(), lambda weights: drafter


def _no_draft_model(weights: str) -> PreTrainedModel:
    raise ValueError("this drafter needs a draft model: pass the model itself as drafter")
