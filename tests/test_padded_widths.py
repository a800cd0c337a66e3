"""Models whose tokens are the same and whose logits are padded to different widths: all laws are over the narrower.

Padding columns are real to a model: here some are made likelier than any token, so that whoever leaves them in a law
writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from toy_engine import CPU, build_decoder, collect, requests_for
from toy_folders import repeating_prompts, save_model, save_prompts, save_tokenizer
from toy_models import VOCAB_SIZE, greedy_reference, random_prompts, tiny_model
from transformers import PreTrainedModel

from experiments import compare_report, report
from experiments.comparison import prepare_comparison
from experiments.config import compose_run
from experiments.models import ModelPool
from experiments.point import PreparedPoint, prepare
from experiments.strategy import build_decoder as build_arm
from specdec import generate
from specdec.drafters.base import DrafterContext, DrafterOptions
from specdec.drafters.draft_model import DraftModelOptions
from specdec.drafters.fallback import FallbackOptions
from specdec.drafters.layer_skip import LayerSkipOptions
from specdec.draws import Draws
from specdec.enumeration import law_of, total_variation
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = VOCAB_SIZE + 6
NEW_TOKENS = 20


def padded(model: PreTrainedModel, width: int) -> PreTrainedModel:
    """The same model with more columns: each is a token's once more, only steeper."""
    config = model.config
    wide = tiny_model("llama", vocab_size=width)
    weights = dict(model.state_dict())
    own = config.vocab_size
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], 1.25 * weights[name][: width - own]])
    wide.load_state_dict(weights)
    return wide


@pytest.fixture(scope="module")
def narrow() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def wide(narrow: PreTrainedModel) -> PreTrainedModel:
    return padded(narrow, WIDE)


# --- the runner


def test_a_cut_pass_has_the_first_columns_of_a_whole_one(wide: PreTrainedModel) -> None:
    whole, cut = ModelRunner(wide, 1, 20), ModelRunner(wide, 1, 20, vocab_size=VOCAB_SIZE)
    assert (whole.vocab_size, cut.vocab_size) == (WIDE, VOCAB_SIZE)
    tokens = torch.tensor([[4, 5, 6]])
    for one, other in (
        (whole.prefill([[1, 2, 3]], [0]), cut.prefill([[1, 2, 3]], [0])),
        (whole.decode(tokens), cut.decode(tokens)),
        (whole.verify(tokens, [3]), cut.verify(tokens, [3])),
    ):
        assert torch.equal(one[..., :VOCAB_SIZE], other)


@pytest.mark.parametrize("width", [0, WIDE + 1])
def test_a_width_that_the_model_does_not_have_is_refused(wide: PreTrainedModel, width: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size={width}: expected 1 to {WIDE}"):
        ModelRunner(wide, 1, 20, vocab_size=width)


# --- greedy output and sampled law


def context_of(runner: ModelRunner, draft: PreTrainedModel, temperature: float) -> DrafterContext:
    sampler = Sampler(SamplingParams(temperature))
    target, width = runner.model, runner.vocab_size
    return DrafterContext(1, 60, width, CPU, sampler, target, lambda weights: draft, runner.cache)


@pytest.mark.parametrize("options", [DraftModelOptions(), FallbackOptions(), LayerSkipOptions()])
@pytest.mark.parametrize("padded_one", ["target", "draft"])
def test_greedy_output_is_that_of_the_model_without_padding(
    narrow: PreTrainedModel, wide: PreTrainedModel, options: DrafterOptions, padded_one: str
) -> None:
    target, draft = (wide, narrow) if padded_one == "target" else (narrow, wide)
    (prompt,) = repeating_prompts([6])
    runner = ModelRunner(target, 1, 60, vocab_size=VOCAB_SIZE)
    drafter = options.build(context_of(runner, draft, 0))
    decoder = build_decoder(runner, num_slots=1, drafter=drafter)
    steps = list(decoder.generate(requests_for([prompt], NEW_TOKENS)))
    assert collect(steps)[0] == greedy_reference(narrow, prompt, NEW_TOKENS)
    if not isinstance(options, LayerSkipOptions):  # the draft is the target: whatever it drafts stands
        assert sum(map(sum, (step.accepted for step in steps))) == sum(
            map(sum, (step.drafted for step in steps))
        )
    assert max(greedy_reference(wide, prompt, NEW_TOKENS)) >= VOCAB_SIZE  # without the cut


@pytest.mark.parametrize(("target_width", "draft_width"), [(3, 5), (5, 3)])
def test_the_law_is_the_targets_over_the_common_tokens(target_width: int, draft_width: int) -> None:
    width, prompt, num_tokens = 3, [0, 2], 3
    target = tiny_model("llama", seed=1, vocab_size=target_width)
    draft = tiny_model("llama", seed=2, vocab_size=draft_width)

    def texts_of(is_speculative: bool) -> Callable[[Draws], tuple[int, ...]]:
        def run(draws: Draws) -> tuple[int, ...]:
            runner = ModelRunner(target, 1, 60, vocab_size=width)
            decoder = build_decoder(
                runner,
                num_slots=1,
                drafter=DraftModelOptions().build(context_of(runner, draft, 1)) if is_speculative else None,
                draft_length=2,
                temperature=1,
                draws=draws,
            )
            return tuple(collect(decoder.generate(requests_for([prompt], num_tokens)))[0])

        return run

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        expected = {
            (*text, token): mass * prob
            for text, mass in expected.items()
            for token, prob in enumerate(common_law(target, [*prompt, *text], width))
        }
    assert total_variation(law_of(texts_of(False)), expected) < 1e-12
    assert total_variation(law_of(texts_of(True)), expected) < 1e-12


def common_law(model: PreTrainedModel, text: list[int], width: int) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1]
    return torch.softmax(logits[:width], -1).tolist()


# --- as a library


def test_generate_is_told_how_many_tokens_both_models_have(
    narrow: PreTrainedModel, wide: PreTrainedModel
) -> None:
    prompts = random_prompts([5, 3])
    expected = [greedy_reference(narrow, prompt, 8) for prompt in prompts]
    for target, draft in ((wide, narrow), (narrow, wide), (wide, wide)):
        options = {"drafter": draft, "max_new_tokens": 8}
        assert generate(target, prompts, vocab_size=VOCAB_SIZE, **options) == expected  # type: ignore[arg-type]
    assert generate(wide, prompts, max_new_tokens=8, vocab_size=VOCAB_SIZE) == expected
    for target, draft, widths in ((wide, narrow, (VOCAB_SIZE, WIDE)), (narrow, wide, (WIDE, VOCAB_SIZE))):
        words = r"vocabulary of {} tokens, the target one of {}.*vocab_size".format(*widths)
        with pytest.raises(ValueError, match=words):
            generate(target, prompts, drafter=draft)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB_SIZE} tokens"):
        generate(wide, prompts, drafter=narrow, vocab_size=WIDE)


# --- as an experiment


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `narrow` and `wide` of one tokenizer; `words` is wide too, and of another."""
    folder = tmp_path_factory.mktemp("widths")
    save_model(folder / "narrow", seed=3)
    for name in ("wide", "words"):
        padded(tiny_model("llama", seed=3), WIDE).float().save_pretrained(folder / name)
    save_tokenizer(folder / "wide")
    save_tokenizer(folder / "words", WIDE)
    save_prompts(folder / "prompts.jsonl", repeating_prompts((3, 6)))
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A point sets torch's threads for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings_of(root: Path, target: str) -> list[str]:
    return [
        f"model.target={root / target}",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
        f"workload.max_new_tokens={NEW_TOKENS}",
        "sampling.ignore_eos=true",
        "dtype=fp32",
        "threads=1",
    ]


def answers(point: PreparedPoint, arm: str) -> dict[int, list[int]]:
    decoder = build_arm(getattr(point.arms, arm), point.pool, point.settings)
    return collect(step for block in point.blocks for step in decoder.generate(block))


@pytest.mark.parametrize(("target", "draft"), [("wide", "narrow"), ("narrow", "wide")])
def test_strategy_twin_and_plain_are_cut_alike(root: Path, target: str, draft: str) -> None:
    overrides = [*settings_of(root, target), f"model.draft={root / draft}", "weights=int8"]
    point = prepare(compose_run(["strategy=specdec", *overrides]))
    assert point.settings.vocab_size == VOCAB_SIZE
    texts = {arm: answers(point, arm) for arm in ("strategy", "twin", "plain")}
    assert texts["strategy"] == texts["twin"]
    assert max(max(text) for found in texts.values() for text in found.values()) < VOCAB_SIZE
    (line,) = [line for line in report.plan_lines(point) if line.startswith("vocabulary")]
    assert f"{VOCAB_SIZE} tokens" in line
    assert f"={root / 'wide'} has {WIDE}" in line
    # Points of a sweep have the draft model in common, whether or not they use it.
    baseline = prepare(compose_run(["strategy=baseline", *overrides]))
    assert answers(baseline, "strategy") == texts["twin"]


def test_models_of_one_width_are_left_whole(root: Path) -> None:
    point = prepare(compose_run(["strategy=baseline", *settings_of(root, "wide")]))
    assert not any(line.startswith("vocabulary") for line in report.plan_lines(point))
    assert max(max(text) for text in answers(point, "strategy").values()) >= VOCAB_SIZE


def test_arms_of_one_target_are_cut_alike(root: Path) -> None:
    """Else the baseline would be no twin of the arm whose draft model is narrower."""
    arms = ["prompt_lookup", f"specdec model.draft={root / 'narrow'}"]
    found = prepare_comparison("baseline", arms, settings_of(root, "wide"))
    assert {point.settings.vocab_size for point in found.points.values()} == {VOCAB_SIZE}
    texts = [answers(point, "strategy") for point in found.points.values()]
    assert texts[0] == texts[1] == texts[2]
    lines = [line for line in compare_report.plan_lines(found) if line.startswith("vocabulary")]
    assert len(lines) == 1


def test_tokenizers_that_differ_are_refused(root: Path) -> None:
    for target, draft in (("narrow", "words"), ("words", "wide")):
        config = compose_run([*settings_of(root, target), f"model.draft={root / draft}"])
        with pytest.raises(ValueError, match=r"model\.draft=.* has another vocabulary than the target"):
            prepare(config)


def test_a_token_that_one_model_has_no_logits_for_is_refused(root: Path) -> None:
    save_tokenizer(save_model(root / "short", vocab_size=50, eos_token_id=49))
    config = compose_run([*settings_of(root, "wide"), f"model.draft={root / 'short'}"])
    with pytest.raises(ValueError, match=rf"model\.draft=.*short.*50.*token 'w50' is {50}"):
        prepare(config)


def test_ids_beyond_the_common_width_are_refused(root: Path) -> None:
    overrides = [*settings_of(root, "wide"), f"model.draft={root / 'narrow'}"]
    config = compose_run([*overrides, f"sampling.stop_token_ids=[{VOCAB_SIZE}]"])
    with pytest.raises(ValueError, match=f"token ids below {VOCAB_SIZE}"):
        prepare(config)


def test_the_pool_says_the_common_width(root: Path) -> None:
    from experiments.config import ModelConfig

    def width(target: str, draft: str | None) -> int:
        config = ModelConfig(str(root / target), draft=None if draft is None else str(root / draft))
        return ModelPool(config, torch.float32, CPU).vocab_size

    assert [width("wide", None), width("narrow", None)] == [WIDE, VOCAB_SIZE]
    assert [width("wide", "narrow"), width("narrow", "wide"), width("wide", "wide")] == [
        VOCAB_SIZE,
        VOCAB_SIZE,
        WIDE,
    ]
