"""Arms side by side: which may be compared, what they share, what a failure costs, and what a reader is told."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_clock import Clock, SimulatedRunner
from toy_engine import build_decoder, requests_for, script
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import compare_report, comparison, plugins, statistics
from experiments.bench import Measured, UnfitPartsError
from experiments.comparison import (
    ArmError,
    ArmSpec,
    ComparisonResult,
    PreparedComparison,
    measure_comparison,
    prepare_comparison,
)
from experiments.equivalence import DIVERGED, EXACT, NEAR_TIE, Comparison
from experiments.load import ForeignLoad
from experiments.measure import measure
from experiments.memory import MemoryProbeError
from experiments.models import ModelSource
from experiments.report import markdown_table, ratio_text
from experiments.statistics import FASTER, NO_DIFFERENCE, SLOWER, TOO_FEW, Ratio

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (3, 6, 5, 4, 7, 3)
NEW_TOKENS = 12
LOOKUP = "prompt_lookup draft_length.max=3"
SELF_DRAFT = "specdec drafter.weights=plain"
QUIET = ForeignLoad(0.0)

# After some calls it raises; before, it drafts the newest token.
FRAGILE = '''
"""Draft the newest token, until it breaks."""

from dataclasses import dataclass

from specdec.drafters.base import Drafter, DrafterOptions
from specdec.types import DraftProposal

GROUP = "drafter"


class FragileDrafter(Drafter):
    def __init__(self, device, calls):
        self.device, self.calls = device, calls

    def propose(self, rows, limits, go_on, draws):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("injected\\nwhile drafting")
        return DraftProposal.certain([row.token_ids[-1:] * min(n, 1) for row, n in zip(rows, limits)], self.device)


@dataclass
class FragileOptions(DrafterOptions):
    calls: int = 40

    def build(self, context):
        return FragileDrafter(context.device, self.calls)
'''
# A workload from outside the tree.
SENTENCES = '''
"""Two short prompts."""

from dataclasses import dataclass

from experiments.workloads.base import Prompt, WorkloadOptions

GROUP = "workload"


@dataclass
class SentencesOptions(WorkloadOptions):
    def load(self, context):
        return [Prompt(f"s-{n}", "none", " ".join(f"w{n + i}" for i in range(4))) for n in range(2)]
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    save_model(folder / "target")
    save_model(folder / "draft", seed=1)
    # for a format of 4 bits
    save_model(folder / "wide", hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    save_prompts(folder / "prompts.jsonl", repeating_prompts(LENGTHS))
    (folder / "fragile.py").write_text(FRAGILE, encoding="utf-8")
    (folder / "sentences.py").write_text(SENTENCES, encoding="utf-8")
    return folder


Prepare = Callable[..., PreparedComparison]


@pytest.fixture(scope="module")
def prepared(root: Path) -> Prepare:
    """A comparison of these candidates with a baseline, on tiny models; nothing but texts is measured unless asked."""

    def prepare(
        *candidates: str, baseline: str = "baseline", shared: Sequence[str] = ()
    ) -> PreparedComparison:
        base = {
            "model.target": str(root / "target"),
            "workload": "jsonl",
            "workload.path": str(root / "prompts.jsonl"),
            "workload.max_new_tokens": str(NEW_TOKENS),
            "dtype": "fp32",
            "threads": "1",
            "measure.memory": "false",
            "measure.ceilings": "skip",
        }
        given = dict(setting.split("=", 1) for setting in shared)
        if given.get("workload", "jsonl") != "jsonl":
            del base["workload.path"], base["workload.max_new_tokens"]
        settings = [f"{key}={value}" for key, value in {**base, **given}.items()]
        return prepare_comparison(baseline, candidates, settings)

    return prepare


@pytest.fixture(scope="module")
def result(prepared: Prepare) -> ComparisonResult:
    return quiet(measure_comparison(prepared(LOOKUP, SELF_DRAFT, shared=["measure.repeats=2"])))


def quiet(result: ComparisonResult) -> ComparisonResult:
    """As on a machine where nothing else ran."""
    return replace(result, measured=replace(result.measured, load=QUIET))


# --- arms as one writes them


@pytest.mark.parametrize(
    ("text", "preset", "overrides"),
    [
        ("baseline", "baseline", ()),
        ("  prompt_lookup   draft_length.max=6 ", "prompt_lookup", ("draft_length.max=6",)),
        ("specdec model.draft='/a b=c'", "specdec", ("model.draft='/a b=c'",)),
        ('specdec model.draft="/a (b)" seed=1', "specdec", ('model.draft="/a (b)"', "seed=1")),
    ],
)
def test_an_arm_is_a_preset_and_overrides_with_quotes_for_hydra(
    text: str, preset: str, overrides: tuple[str, ...]
) -> None:
    spec = ArmSpec.parse(text)
    assert (spec.preset, spec.overrides) == (preset, overrides)
    assert spec.label == " ".join((preset, *overrides))


@pytest.mark.parametrize("text", ["", "  ", "draft_length.max=6", "specdec model.draft='/a b", "'specdec"])
def test_what_is_no_arm_is_shown_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"arm {text!r}: expected a strategy preset")):
        ArmSpec.parse(text)


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("batch_size=2", "batch_size"),
        ("seed=7", "seed"),
        ("threads=2", "threads"),
        ("device=cpu", "device"),
        ("workload.limit=2", "workload"),
        ("workload=embedded", "workload"),
        ("sampling.temperature=1", "sampling"),
        ("measure.repeats=2", "measure"),
        ("+study=other", "study"),
    ],
)
@pytest.mark.parametrize("is_baseline", [False, True])
def test_an_arm_that_sets_what_all_share_is_named(
    prepared: Prepare, override: str, setting: str, is_baseline: bool
) -> None:
    arms = [f"prompt_lookup {override}", "baseline"]
    baseline, candidate = arms if is_baseline else reversed(arms)
    with pytest.raises(
        ValueError, match=rf"^arm 'prompt_lookup {re.escape(override)}' sets {setting}, which all"
    ):
        prepared(candidate, baseline=baseline)


@pytest.mark.parametrize(
    ("arm", "shared"), [("prompt_lookup", ["strategy=specdec"]), ("prompt_lookup strategy=specdec", [])]
)
def test_the_strategy_is_said_once(prepared: Prepare, arm: str, shared: list[str]) -> None:
    with pytest.raises(ValueError, match="strategy"):
        prepared(arm, shared=shared)


def test_an_arm_that_does_not_check_out_is_named(prepared: Prepare) -> None:
    with pytest.raises(ArmError) as caught:
        prepared("prompt_lookup", "prompt_lookup draft_length.max=0")
    assert caught.value.label == "prompt_lookup draft_length.max=0"
    assert "draft_length.max=0" in str(caught.value.__cause__)


def test_arms_of_other_tokens_are_refused(prepared: Prepare, root: Path) -> None:
    from toy_folders import save_tokenizer

    other = save_model(root / "other_words", seed=2)
    save_tokenizer(other, prefix="v")
    with pytest.raises(ValueError, match="other tokens than the baseline"):
        prepared(f"baseline model.target={other}")


def test_an_arm_given_twice_gets_a_number(prepared: Prepare) -> None:
    found = prepared("prompt_lookup", "baseline", "prompt_lookup", "prompt_lookup")
    assert found.baseline == "baseline"
    assert found.candidates == ["prompt_lookup", "baseline (2)", "prompt_lookup (2)", "prompt_lookup (3)"]
    assert [found.arm(label).name for label in found.candidates] == found.candidates


# --- what a comparison shares and refers to


def test_arms_of_one_target_share_its_weights(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: Counter[str] = Counter()
    whole = ModelSource.model

    def counting(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
        loads[Path(source.name).name] += 1
        return whole(source, dtype, device)

    monkeypatch.setattr(ModelSource, "model", counting)
    draft = f"specdec model.draft={Path(prepared().shared.config.model.target).parent / 'draft'}"
    measure_comparison(prepared(LOOKUP, SELF_DRAFT, draft, f"{draft} draft_length.max=2"))
    assert loads == {"target": 1, "draft": 1}


def test_the_references_are_found_among_the_arms(prepared: Prepare) -> None:
    found = prepared(LOOKUP, SELF_DRAFT, "no_cache")
    for label in found.candidates:
        assert found.reference_of(label, "twin") == found.reference_of(label, "plain") == "baseline"
    assert found.reference_of("baseline", "twin") is found.reference_of("baseline", "plain") is None
    other = prepared("baseline", baseline=LOOKUP)
    assert other.reference_of(LOOKUP, "twin") == "baseline"


def test_quantized_weights_have_a_twin_of_their_own(prepared: Prepare, root: Path) -> None:
    nf4 = ("baseline weights=bnb_nf4", "prompt_lookup weights=bnb_nf4")
    shared = [f"model.target={root / 'wide'}"]
    both = prepared(*nf4, shared=shared)
    assert [both.reference_of(nf4[1], role) for role in ("twin", "plain")] == [nf4[0], "baseline"]
    assert [both.reference_of(nf4[0], role) for role in ("twin", "plain")] == [None, "baseline"]
    alone = prepared(nf4[1], shared=shared)
    assert [alone.reference_of(nf4[1], role) for role in ("twin", "plain")] == [None, "baseline"]


@pytest.mark.parametrize("setting", ["dtype=fp64", "prefill_chunk=2", "model.target={root}/draft"])
def test_an_arm_of_another_engine_is_no_reference(prepared: Prepare, root: Path, setting: str) -> None:
    label = f"prompt_lookup {setting.format(root=root)}"
    assert prepared(label).reference_of(label, "twin") is None


def test_a_draft_model_makes_no_difference_to_the_reference(prepared: Prepare, root: Path) -> None:
    label = f"specdec model.draft={root / 'draft'} drafter.weights=plain"
    assert prepared(label).reference_of(label, "twin") == "baseline"


def test_a_workload_from_outside_is_the_same_for_all_arms(
    prepared: Prepare, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_registry", {})
    shared = [f"plugin={root / 'sentences.py'}", "workload=sentences"]
    found = prepared("prompt_lookup", shared=shared)
    assert found.reference_of("prompt_lookup", "twin") == "baseline"


# --- measuring


def test_every_arm_decodes_every_block_and_the_baseline_again(result: ComparisonResult) -> None:
    blocks = Counter((trace.arm, trace.block) for trace in result.measured.traces)
    arms = ("baseline", LOOKUP, SELF_DRAFT, "baseline again")
    assert blocks == dict.fromkeys(((arm, block) for arm in arms for block in range(len(LENGTHS))), 2)
    assert result.comparison.num_block_runs == sum(blocks.values())
    assert result.measured.again == ("baseline again", "baseline")
    assert result.measured.noise_floor is not None


def test_without_aa_there_is_no_second_baseline(prepared: Prepare) -> None:
    found = prepared(LOOKUP, shared=["measure.aa=false", "workload.limit=2"])
    measured = measure_comparison(found)
    assert {trace.arm for trace in measured.measured.traces} == {"baseline", LOOKUP}
    assert measured.measured.noise_floor is None
    assert found.num_block_runs == 2 * 2


def test_texts_are_graded_against_the_twin(result: ComparisonResult) -> None:
    for label in (LOOKUP, SELF_DRAFT):
        assert result.equivalence(label) == EXACT
        assert result.same_texts(label) == (2 * len(LENGTHS), 2 * len(LENGTHS))
        assert result.quality(label)["quality/exact_match_pct"] == 100
        assert result.lossless(label)
    assert result.equivalence("baseline") == "n/a"
    assert result.quality("baseline") == {}


def test_other_weights_write_other_texts_and_have_no_grade(prepared: Prepare, root: Path) -> None:
    other = f"baseline model.target={root / 'draft'}"
    found = measure_comparison(prepared(other))
    equal, number = found.same_texts(other)
    assert (equal < number, number) == (True, len(LENGTHS))
    assert found.equivalence(other) == "n/a"


def test_a_lossless_arm_that_diverges_is_not_lossless(result: ComparisonResult) -> None:
    diverged = replace(result, grades={**result.grades, LOOKUP: [Comparison(0, DIVERGED, 1, 2, 3)]})
    assert not diverged.lossless(LOOKUP)
    assert diverged.quality(LOOKUP)["quality/diverged_n"] == 1


def test_sampled_texts_have_no_grade(prepared: Prepare) -> None:
    found = measure_comparison(prepared(LOOKUP, shared=["sampling.temperature=1", "workload.limit=1"]))
    assert found.equivalence(LOOKUP) == "n/a"


def test_metrics_of_an_arm_have_their_contract_names(result: ComparisonResult) -> None:
    found = compare_report.arm_metrics(result, LOOKUP)
    for name in ("decode_vs_baseline", "decode_vs_plain", "decode_vs_twin", "total_vs_baseline"):
        assert {f"speedup/{name}", f"speedup/{name}.ci_low", f"speedup/{name}.ci_high"} <= set(found)
    assert {"latency/tpot_ms.p50", "latency/tokenize_ms.mean", "spec/predicted_speedup"} <= set(found)
    assert found["quality/exact_match_pct"] == 100
    baseline = compare_report.arm_metrics(result, "baseline")
    assert not [name for name in baseline if name.startswith(("speedup/", "quality/"))]


def test_a_speculating_baseline_has_its_own_references(prepared: Prepare) -> None:
    found = measure_comparison(prepared("baseline", baseline=LOOKUP))
    assert set(found.references(LOOKUP)) == {"plain", "twin"}
    assert set(found.references("baseline")) == {"baseline"}
    assert found.equivalence(LOOKUP) == EXACT


def test_few_pairs_have_a_ratio_but_no_interval(prepared: Prepare) -> None:
    found = measure_comparison(prepared(LOOKUP, shared=["workload.limit=3"]))
    names = compare_report.arm_metrics(found, LOOKUP)
    assert "speedup/decode_vs_baseline" in names
    assert "speedup/decode_vs_baseline.ci_low" not in names
    assert found.verdict(LOOKUP) == TOO_FEW


# --- failures


def test_speed_ups_by_category_are_those_of_its_prompts(root: Path, prepared: Prepare) -> None:
    file = save_prompts(root / "categories.jsonl", repeating_prompts(LENGTHS), ["odd one", "even"])
    shared = [f"workload.path={file}", "measure.repeats=3"]
    found = quiet(measure_comparison(prepared(LOOKUP, shared=shared)))
    ours, reference = (found.measured.timelines_of(label) for label in (LOOKUP, "baseline"))
    texts: dict[str, Ratio | None] = {}
    for category, parity in (("odd one", 0), ("even", 1)):
        assert found.by_category[category] == {
            LOOKUP: statistics.decode_speedup(
                {unit: timeline for unit, timeline in ours.items() if unit[0] % 2 == parity}, reference
            )
        }
        texts[category] = found.by_category[category][LOOKUP]
    assert list(found.by_category) == ["odd one", "even"]
    assert texts["odd one"] != texts["even"]
    assert compare_report.category_rows(found) == [
        ["category", LOOKUP],
        *([category, ratio_text(ratio)] for category, ratio in texts.items()),
    ]
    (line,) = compare_report.category_lines(found)
    assert line in compare_report.notes(found)
    metrics = compare_report.metrics(found)
    for category in ("odd_one", "even"):
        assert f"compare/prompt_lookup_draft_length.max_3.decode.{category}.ci_low" in metrics
    assert "## Decode speed-up by category" in compare_report.markdown(
        found, compare_report.console_rows(found)
    )


def test_a_mismatch_has_one_line_and_many_near_ties_are_counted(result: ComparisonResult) -> None:
    ties = [Comparison(0, NEAR_TIE, position, 1, 2, 0.5, 1.0) for position in (1, 2, 3, 3, 3)]
    bug = Comparison(1, DIVERGED, 4, 1, 2, 0.5, 0.1)
    found = replace(result, grades={LOOKUP: [Comparison(2, EXACT), *ties, bug]})
    whole = [line for line in compare_report.notes(found) if line.startswith(LOOKUP) and "new token" in line]
    assert [line.split(": ")[0] for line in whole] == [f"{LOOKUP}, diverged", *[f"{LOOKUP}, near_tie"] * 3]
    assert [line.endswith(", 3 times") for line in whole] == [False, False, False, True]
    brief = [line for line in compare_report.notes(found, 1) if line.startswith(f"{LOOKUP}, ")]
    assert whole[0] in brief
    assert whole[1] in brief
    assert f"{LOOKUP}, and 2 more near ties, one line each in report.md" in brief
    assert whole[2] not in brief


def test_one_category_has_no_table(result: ComparisonResult) -> None:
    assert result.by_category == {}
    assert compare_report.category_rows(result) == list(compare_report.category_lines(result)) == []
    assert "by category" not in compare_report.markdown(result, compare_report.console_rows(result))


ODD_CATEGORIES = ("", "a|b\nc", "x" * 300, "ci_low", "\u6570\u5b66", "\u7269\u7406")


def test_categories_may_have_any_name(root: Path, prepared: Prepare) -> None:
    file = save_prompts(root / "odd.jsonl", repeating_prompts(LENGTHS), ODD_CATEGORIES)
    long = f"prompt_lookup draft_length.max={'0' * 200}3"
    shared = [f"workload.path={file}"]
    found = as_result(
        prepared(LOOKUP, long, shared=shared),
        simulated({"baseline": 1.0, LOOKUP: 1.1, long: 1.2, "baseline again": 1.0}),
    )
    names = compare_report.metrics(found)
    assert all(re.fullmatch(r"[/\w.\- :]+", name, re.ASCII) and len(name) <= 250 for name in names)
    decode = compare_report.metric_names(found.comparison.points)[LOOKUP]
    of_categories = [name for name in names if re.match(rf"compare/{re.escape(decode)}\.decode\.", name)]
    assert len(of_categories) == len(ODD_CATEGORIES) + 2  # and the interval of all
    overall = found.speedups[LOOKUP].decode
    assert overall is not None
    assert names[f"compare/{decode}.decode.ci_low"] == overall.ci_low
    table = markdown_table(compare_report.category_rows(found)).splitlines()
    assert len(table) == 2 + len(ODD_CATEGORIES)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}
    for line in compare_report.category_lines(found):
        assert line.isprintable()
        assert "unnamed 0." in line


def test_without_a_candidate_or_a_pair_nothing_is_said_by_category(root: Path, prepared: Prepare) -> None:
    file = save_prompts(root / "two.jsonl", repeating_prompts(LENGTHS), ["odd", "even"])
    measured = simulated(dict.fromkeys(("baseline", LOOKUP, "baseline again"), 1.0))
    ran = as_result(prepared(LOOKUP, shared=[f"workload.path={file}"]), measured)
    failed = replace(ran, measured=replace(measured, failures={LOOKUP: RuntimeError("injected")}))
    assert compare_report.category_rows(failed) == list(compare_report.category_lines(failed)) == []
    nothing = replace(ran)
    vars(nothing)["by_category"] = {"odd": {LOOKUP: None}, "even": {LOOKUP: None}}
    assert list(compare_report.category_lines(nothing)) == []
    assert compare_report.category_rows(nothing)[1:] == [["odd", "-"], ["even", "-"]]


def test_a_candidate_that_cannot_be_built_leaves_the_others(prepared: Prepare) -> None:
    label = "baseline weights=bnb_nf4 weights.keep=[nothing]"
    found = measure_comparison(prepared(label, LOOKUP))
    assert isinstance(found.measured.failures[label], UnfitPartsError)
    assert set(found.speedups) == {LOOKUP}
    assert found.equivalence(LOOKUP) == EXACT
    assert found.references(label) == {}


@pytest.fixture
def fragile(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plugins, "_registry", {})
    return f"specdec plugin={root / 'fragile.py'} drafter=fragile"


def test_a_candidate_that_breaks_half_way_leaves_the_others(prepared: Prepare, fragile: str) -> None:
    found = measure_comparison(prepared(fragile, LOOKUP, shared=["measure.warmup=0"]))
    assert set(found.measured.failures) == {fragile}
    assert not found.measured.traces_of(fragile)
    assert len(found.measured.traces_of(LOOKUP)) == len(LENGTHS)
    (line, other) = compare_report.verdict_lines(found)
    assert line.startswith(f"{fragile}: failed, no figures (RuntimeError: injected while drafting")
    assert other.startswith(f"{LOOKUP}: ")
    heading, *body = compare_report.rows(found)
    column = heading.index(fragile)
    assert {row[column] for row in body} <= {"-", "failed", "n/a"}
    assert fragile not in compare_report.metrics(found)


def test_a_baseline_that_fails_is_raised(prepared: Prepare, fragile: str) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        measure_comparison(prepared("baseline", baseline=f"{fragile} drafter.calls=3"))
    with pytest.raises(UnfitPartsError, match="bnb_nf4"):
        measure_comparison(prepared("baseline", baseline="baseline weights=bnb_nf4 weights.keep=[nothing]"))


def test_memory_that_could_not_be_measured_is_explained(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: Any) -> None:
        raise MemoryProbeError("injected: no child")

    monkeypatch.setattr(comparison, "measure_memory", failing)
    found = measure_comparison(prepared(LOOKUP, shared=["measure.memory=true", "workload.limit=1"]))
    assert found.memories == {}
    lines = [line for line in compare_report.notes(found) if "injected: no child" in line]
    assert [line.partition(":")[0] for line in lines] == ["baseline", LOOKUP]


def test_ceilings_of_one_dtype_are_not_held_against_another(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ["measure.ceilings=auto", "workload.limit=1"]

    def never(*_: Any) -> dict[str, float]:
        raise AssertionError("measured ceilings")

    found = measure_comparison(prepared("baseline dtype=fp64", shared=shared), remember=never)
    assert found.measured.ceilings is None
    assert [line for line in compare_report.notes(found) if "dtype" in line]


# --- a planted slowdown, on a simulated clock


class Wandering(SimulatedRunner):
    """Its passes take up to 3 % more or less, from a seed."""

    def decode(self, token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        kept, self.scale = self.scale, self.scale * self.random.uniform(0.97, 1.03)
        logits = super().decode(token_ids, counts)
        self.scale = kept
        return logits

    random = random.Random(0)


def simulated(scales: Mapping[str, float]) -> Measured:
    """Arms whose passes take `scales` times as long, over eight prompts."""
    clock = Clock()
    law = script(list(range(16)), 16, 4)
    decoders = {
        arm: build_decoder(Wandering(law, 16, 1, clock, scale), num_slots=1) for arm, scale in scales.items()
    }
    blocks = [[request] for request in requests_for([[0] * 4] * 8, 12)]
    Wandering.random = random.Random(0)
    traces = measure(decoders, blocks, warmup=0, seed=1, clock=clock)
    return Measured(traces, {}, QUIET, again=("baseline again", "baseline"))


def as_result(comparison_: PreparedComparison, measured: Measured) -> ComparisonResult:
    return ComparisonResult(comparison_, measured, {}, {}, {})


def test_a_planted_slowdown_is_found_and_the_same_arm_again_is_not(prepared: Prepare) -> None:
    scales = {"baseline": 1.0, "baseline again": 1.0, LOOKUP: 1.1, SELF_DRAFT: 0.8}
    found = as_result(prepared(LOOKUP, SELF_DRAFT), simulated(scales))
    assert (found.verdict(LOOKUP), found.verdict(SELF_DRAFT)) == (SLOWER, FASTER)
    assert found.measured.validity == "ok"
    assert found.measured.noise_floor is not None
    assert found.measured.noise_floor.verdict == NO_DIFFERENCE
    decode = found.speedups[LOOKUP].decode
    assert decode is not None
    assert decode.value == pytest.approx(1 / 1.1, rel=0.01)


def test_an_arm_that_differs_from_itself_takes_all_verdicts_back(prepared: Prepare) -> None:
    scales = {"baseline": 1.0, "baseline again": 1.2, LOOKUP: 0.5}
    found = as_result(prepared(LOOKUP), simulated(scales))
    assert found.verdict(LOOKUP) == "noisy"
    assert "no verdict" in compare_report.verdict_lines(found)[0]


# --- what a reader is told


@pytest.mark.parametrize(
    ("verdict", "ratio", "sentence"),
    [
        (FASTER, Ratio(1.5, 1.2, 1.8, 12), "decodes faster, 1.50x [1.20, 1.80]"),
        (SLOWER, Ratio(0.5, 0.4, 0.6, 12), "decodes slower, 0.50x [0.40, 0.60]"),
        (NO_DIFFERENCE, Ratio(1.0, 0.9, 1.1, 12), "no difference shown, 1.00x [0.90, 1.10]"),
        (TOO_FEW, Ratio(1.4, None, None, 3), "no verdict from fewer than 6 pairs of texts, 1.40x"),
        ("noisy", Ratio(1.4, 1.2, 1.6, 12), "no verdict, times are noisy, 1.40x [1.20, 1.60]"),
        (TOO_FEW, None, "no usable pair of texts, no verdict"),
    ],
)
def test_every_verdict_is_a_sentence(verdict: str, ratio: Ratio | None, sentence: str) -> None:
    assert compare_report.sentence(verdict, ratio) == sentence


def test_a_verdict_comes_with_the_total_and_the_texts(result: ComparisonResult) -> None:
    first, second = compare_report.verdict_lines(result)
    assert first.startswith(f"{LOOKUP}: ")
    assert re.search(
        r"; total \d+\.\d\dx \[.*\]; 12 of 12 texts as the baseline's; exact against its twin$", first
    )
    assert second.startswith(f"{SELF_DRAFT}: ")


def test_the_report_has_a_column_per_arm_and_says_what_was_compared(result: ComparisonResult) -> None:
    text = compare_report.markdown(result, compare_report.console_rows(result))
    assert markdown_table(compare_report.console_rows(result)) in text
    table = [line for line in text.partition("## All figures")[2].splitlines() if line.startswith("|")]
    assert table[0] == f"| arm | baseline | {LOOKUP} | {SELF_DRAFT} |"
    assert {line.count("|") for line in table} == {5}
    assert text.startswith("# Against baseline\n\n* prompt_lookup")
    assert "peak memory" not in text  # it was not asked for
    for part in ("**candidate** prompt_lookup", "target, fp32", "1 thread", "6 prompts", "fixed(max=3)"):
        assert part in text


def test_the_plan_says_model_dtype_and_the_second_baseline(prepared: Prepare, root: Path) -> None:
    text = "\n".join(compare_report.plan_lines(prepared(LOOKUP)))
    assert f"model      {root / 'target'}, fp32" in text
    assert "18 blocks of prompts in turn, baseline a second time among them to see the noise" in text
    other = compare_report.plan_lines(prepared("baseline dtype=fp64"))
    assert f"candidate  baseline dtype=fp64: {root / 'target'}, fp64, plain / dense / autoregressive" in other
    assert not [line for line in other if line.startswith("model")]
    drafting = compare_report.plan_lines(prepared("specdec", shared=[f"model.draft={root / 'draft'}"]))
    assert drafting[1].endswith(f", draft {root / 'draft'}")
    assert "draft" not in drafting[0]


@pytest.mark.parametrize("columns", [80, 100])
def test_arms_keep_their_names_on_a_narrow_terminal(result: ComparisonResult, columns: int) -> None:
    from rich.console import Console

    from experiments.console_table import ConsoleTable

    console = Console(width=columns, highlight=False, soft_wrap=True, color_system=None)
    with console.capture() as capture:
        console.print(ConsoleTable(compare_report.console_rows(result)))
    shown = capture.get()
    assert "prompt_lookup" in shown
    assert "specdec" in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_prompts_left_out_are_those_of_their_pair(result: ComparisonResult) -> None:
    """One candidate's loop takes nothing from another's speed-up."""
    traces = [
        replace(trace, steps=trace.steps[:1]) if trace.arm == SELF_DRAFT and trace.block == 2 else trace
        for trace in result.measured.traces
    ]
    found = replace(result, measured=replace(result.measured, traces=traces))
    before = {line for line in compare_report.notes(result) if "no speed-up" in line}
    lines = [line for line in compare_report.notes(found) if "no speed-up" in line and line not in before]
    assert sorted(lines) == [
        f"{SELF_DRAFT}, no speed-up from prompt 3, repeat {repeat}: only 1 new tokens" for repeat in (0, 1)
    ]


def test_metric_names_are_ones_that_mlflow_takes(prepared: Prepare, root: Path) -> None:
    arms = [f"specdec model.draft='{root / 'draft'}'", "baseline", LOOKUP, LOOKUP]
    found = prepared(*arms)
    measured = simulated(dict.fromkeys([*found.points, "baseline again"], 1.0))
    names = compare_report.metrics(as_result(found, measured))
    assert all(re.fullmatch(r"[/\w.\- :]+", name, re.ASCII) and len(name) <= 250 for name in names)
    decode = [name for name in names if name.startswith("compare/") and name.endswith(".decode")]
    assert len(decode) == len(arms)


def test_labels_that_look_alike_or_are_long_keep_names_of_their_own() -> None:
    labels = ["a x=1", "a x+1", f"a x={'y' * 400}1", f"a x={'y' * 400}2"]
    names = compare_report.metric_names(labels)
    assert len(set(names.values())) == len(labels)
    assert max(map(len, names.values())) <= 200


def test_a_figure_is_titled_with_what_its_arms_share(prepared: Prepare, root: Path) -> None:
    assert compare_report.title(prepared(LOOKUP)) == f"{root / 'target'}, fp32, cpu, 1 thread, batch 1"
    assert compare_report.title(prepared("baseline dtype=fp64")) == "cpu, 1 thread, batch 1"


def test_the_picture_has_a_row_for_each_candidate_and_the_noise(result: ComparisonResult) -> None:
    (name,) = compare_report.interval_figure(result)
    assert name == "intervals.png"
    figure = compare_report.interval_figure(result)[name]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [LOOKUP, SELF_DRAFT, "baseline again"]


def test_speedups_are_those_of_the_traces(result: ComparisonResult) -> None:
    ours, theirs = (result.measured.timelines_of(name) for name in (LOOKUP, "baseline"))
    assert result.speedups[LOOKUP] == statistics.speedups(ours, theirs)
