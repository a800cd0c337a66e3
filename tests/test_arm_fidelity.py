"""Fidelity of arms, end to end on tiny real models: which are read, what shows, and what a reader is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import arm_fidelity, compare_report, fidelity_report, measured_point, report
from experiments.arm_fidelity import (
    FLOOR_CHUNKS,
    ArmFidelity,
    PredictedAcceptance,
    judged,
    measure_fidelity,
    own_texts,
)
from experiments.comparison import ComparisonResult, measure_comparison, prepare_comparison
from experiments.config import compose_run
from experiments.fidelity import Fidelity
from experiments.measured_point import PointResult, measure_point
from experiments.point import PreparedPoint, prepare
from experiments.strategy import Arm, build_drafter, build_runner
from experiments.teacher_forcing import ForcedText
from experiments.trace import answers_of
from specdec.progress import Row
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (3, 6, 5)
NEW_TOKENS = 14

ROUNDED = '''
"""Values of final tokens are rounded to multiples of `step`, as a store that packs them would."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.kv_stores.dense import DenseStore

GROUP = "kv"


class RoundedStore(DenseStore):
    def __init__(self, shape, step):
        super().__init__(shape)
        self.step = step

    def commit(self, lengths):
        for slot, length in enumerate(lengths):
            kept = self._values[:, slot, :, :length]
            kept.copy_((kept / self.step).round() * self.step)


@dataclass
class RoundedOptions:
    step: float = 0.5
    lossless: ClassVar[bool] = False

    def build(self, shape):
        return RoundedStore(shape, self.step)
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fidelity")
    save_model(folder / "target")
    save_model(folder / "draft", seed=1)
    save_prompts(folder / "prompts.jsonl", repeating_prompts(LENGTHS))
    (folder / "rounded.py").write_text(ROUNDED, encoding="utf-8")
    return folder


def shared(root: Path) -> list[str]:
    return [
        f"model.target={root / 'target'}",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
        f"workload.max_new_tokens={NEW_TOKENS}",
        "sampling.ignore_eos=true",
        "fidelity.corpus_tokens=60",
        "dtype=fp64",
        "threads=1",
        "measure.aa=false",
        "measure.warmup=0",
        "measure.ceilings=skip",
        "measure.memory=false",
    ]


def point(root: Path, *overrides: str) -> PreparedPoint:
    given = {override.partition("=")[0] for override in overrides}
    base = [one for one in shared(root) if one.partition("=")[0] not in given]
    return prepare(compose_run([*base, *overrides]))


def rounding(root: Path, *more: str) -> list[str]:
    return [f"plugin={root / 'rounded.py'}", "kv=rounded", *more]


def answers_for(ready: PreparedPoint) -> dict[int, Sequence[int]]:
    """Whatever text: laws are compared on it all the same."""
    return {r.request_id: [(7 * r.request_id + 3 * n) % 50 for n in range(12)] for r in ready.requests}


def fidelity_of(ready: PreparedPoint) -> ArmFidelity:
    return measure_fidelity({"one": ready}, answers_for(ready), drafting(ready))["one"]


def drafting(ready: PreparedPoint) -> list[str]:
    return ["one"] if ready.config.strategy in ("specdec", "layer_skip") else []


@pytest.fixture(scope="module")
def result(root: Path, one_thread: None) -> PointResult:
    """Speculation with a quantized cache and a draft model."""
    more = ["strategy=specdec", f"model.draft={root / 'draft'}", "fidelity.chunk=1"]
    return measure_point(point(root, *rounding(root, *more)))


# --- what is read


def test_texts_are_the_references_answers_up_to_so_many_tokens() -> None:
    requests = [Request(index, (50, 51), 8) for index in range(4)]
    answers = {0: (1, 2, 3), 1: (), 2: (4, 5, 6), 3: (7,)}
    whole = own_texts(requests, answers, 100)
    assert [text.token_ids for text in whole] == [(50, 51, 1, 2, 3), (50, 51, 4, 5, 6), (50, 51, 7)]
    assert {text.num_given for text in whole} == {2}
    assert own_texts(requests, answers, 5) == [whole[0], ForcedText((50, 51, 4, 5), 2)]
    assert own_texts(requests, answers, 0) == own_texts(requests, {}, 9) == []


def test_a_point_has_a_corpus_where_its_laws_are_not_the_references(root: Path) -> None:
    assert not point(root, "strategy=prompt_lookup").corpus
    corpus = point(root, "strategy=prompt_lookup", *rounding(root)).corpus
    assert sum(text.num_scored for text in corpus) == 60
    assert max(len(text.token_ids) for text in corpus) <= 128
    assert point(root, *rounding(root), "strategy=baseline", "fidelity.corpus=none").corpus == []
    with pytest.raises(ValueError, match="expected topics, none, hf, or a file of text"):
        point(root, "strategy=baseline", "fidelity.corpus=missing.txt")


@pytest.mark.parametrize("strategy", ["baseline", "no_cache", "prompt_lookup", "suffix"])
def test_an_arm_that_keeps_the_laws_and_has_no_draft_model_reads_nothing(
    root: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = point(root, f"strategy={strategy}")
    monkeypatch.setattr(ModelRunner, "prefill", lambda *_: pytest.fail("something was read"))
    assert measure_fidelity({"one": ready}, answers_for(ready), drafting(ready)) == {}


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_passes_are_as_wide_as_asked_for_and_the_floors_are_not(
    root: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = point(
        root, "strategy=baseline", *rounding(root, f"fidelity.chunk={chunk}", "fidelity.corpus=none")
    )
    widths: dict[ModelRunner, list[int]] = {}
    verify = ModelRunner.verify

    def noting(self: ModelRunner, token_ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        widths.setdefault(self, []).append(token_ids.shape[1])
        return verify(self, token_ids, counts)

    monkeypatch.setattr(ModelRunner, "verify", noting)
    fidelity_of(ready)
    widest = sorted(max(found) for found in widths.values())
    floor = FLOOR_CHUNKS[0] if chunk != FLOOR_CHUNKS[0] else FLOOR_CHUNKS[1]
    # Reference and strategy, and the reference again; 11 tokens are read behind each prompt.
    assert widest == sorted([chunk, chunk, floor])
    assert {sum(found) for found in widths.values()} == {11 * len(LENGTHS)}


def test_passes_of_one_shape_are_for_bits_not_for_laws(root: Path) -> None:
    """Texts are read as wide as asked for, also where the run's own passes are narrower."""
    parts = ("strategy=baseline", *rounding(root, "fidelity.chunk=8", "fidelity.corpus=none"))
    of_one_shape = point(root, *parts, "exactness=bitwise", "exactness.pass_tokens=2")
    assert fidelity_of(of_one_shape) == fidelity_of(point(root, *parts))


# --- what shows


def test_a_cache_that_loses_values_shows_and_one_that_does_not_is_at_the_floor(root: Path) -> None:
    exact = fidelity_of(point(root, "strategy=baseline", *rounding(root, "kv.step=1e-300")))
    found = {
        step: fidelity_of(point(root, "strategy=baseline", *rounding(root, f"kv.step={step}")))
        for step in (1e-9, 0.01, 1.0)
    }
    for prefix in ("", "corpus_"):
        kl = [one.laws[prefix].kl_mean for one in found.values()]
        assert kl == sorted(kl)
        assert kl[0] < 1e-12 < 1e-7 < kl[1] < kl[2]
        pair = found[1.0].beside_floor(prefix)
        assert pair is not None
        ours, floor = pair
        assert floor.kl_mean < 1e-12
        assert (floor.top1_agreement_pct, floor.flips_n) == (100, 0)
        assert ours.expected_acceptance < floor.expected_acceptance
    assert exact.laws[""].num_positions == 12 * len(LENGTHS)
    assert exact.laws["corpus_"].num_positions == 60


def test_a_full_forward_would_not_have_seen_it(root: Path) -> None:
    ready = point(root, "strategy=baseline", *rounding(root, "kv.step=1.0"))
    assert fidelity_of(ready).laws[""].kl_median > 1e-3
    (text, *_) = own_texts(ready.requests, answers_for(ready), 100)
    lossy, dense = (
        build_runner(arm, ready.pool, replace(ready.settings, num_slots=1, capacity=64))
        for arm in (ready.arms.strategy, ready.arms.plain)
    )
    torch.testing.assert_close(lossy.prefill([text.token_ids], [0]), dense.prefill([text.token_ids], [0]))


def test_without_texts_or_a_corpus_the_other_is_left(root: Path) -> None:
    no_texts = fidelity_of(point(root, "strategy=baseline", *rounding(root, "fidelity.text_tokens=0")))
    assert set(no_texts.laws) == {"corpus_", "corpus_floor_"}
    no_corpus = fidelity_of(point(root, "strategy=baseline", *rounding(root, "fidelity.corpus=none")))
    assert set(no_corpus.laws) == {"", "floor_"}
    ready = point(
        root, "strategy=baseline", *rounding(root, "fidelity.text_tokens=0", "fidelity.corpus=none")
    )
    assert measure_fidelity({"one": ready}, answers_for(ready), drafting(ready)) == {}


# --- predicted acceptance


def test_a_draft_token_stands_with_the_mass_that_both_laws_share() -> None:
    draft = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    target = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.75, 0.0]]).log()
    row = Row(Request(0, (1,), 4), slot=0)
    found = judged(Sampler(SamplingParams(1.0)), row, (0, 2), draft, target)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.75], [0.0, 1.0]]).double(), atol=1e-6, rtol=0)
    cut = judged(Sampler(SamplingParams(1.0, top_k=1)), row, (0, 2), draft, target)
    torch.testing.assert_close(cut, torch.tensor([[0.0, 1.0], [0.0, 1.0]]).double())


def test_penalties_act_on_the_text_before_each_position() -> None:
    """Token 2 is banned behind 1, which the second position has before it and the first has not."""
    laws = torch.tensor([[0.25, 0.25, 0.5]] * 2).log()
    other = torch.tensor([[0.5, 0.5, 0.0]] * 2).log()
    row = Row(Request(0, (0,), 4), slot=0)
    found = judged(Sampler(SamplingParams(1.0, bad_words=((1, 2),))), row, (1, 0), laws, other)
    torch.testing.assert_close(found[0], torch.tensor([0.5, 1.0]).double(), atol=1e-6, rtol=0)


def test_a_draft_that_is_the_target_is_always_accepted(root: Path) -> None:
    found = fidelity_of(point(root, "strategy=specdec", "drafter.weights=plain"))
    assert found.laws == {}
    assert found.acceptance is not None
    assert found.acceptance.law == pytest.approx(1, abs=1e-6)
    assert (found.acceptance.greedy, found.acceptance.num_positions) == (1, 12 * len(LENGTHS))


def test_a_draft_is_held_against_the_target_that_judges_it(root: Path) -> None:
    """With a lossy cache of the target even its own copy is not always accepted, unless it drafts on that cache."""
    lossy = rounding(root, "drafter.weights=plain", "kv.step=1.0")
    shared = fidelity_of(point(root, "strategy=specdec", *lossy))
    assert shared.acceptance is not None
    assert shared.acceptance.law == pytest.approx(1.0, abs=1e-9)
    found = fidelity_of(point(root, "strategy=specdec", *lossy, "drafter.cache=own"))
    assert found.acceptance is not None
    assert found.acceptance.law == pytest.approx(found.laws[""].expected_acceptance, abs=1e-6)
    assert found.acceptance.law < 0.9


def test_what_is_read_in_other_passes_is_predicted_alike(root: Path) -> None:
    """Penalties look at the whole text before a position, not at what its pass has of it."""
    found = [
        fidelity_of(
            point(
                root,
                *("strategy=specdec", f"model.draft={root / 'draft'}", f"fidelity.chunk={chunk}"),
                *(
                    "sampling.repetition_penalty=2.5",
                    "sampling.frequency_penalty=3",
                    "sampling.temperature=2",
                ),
            )
        ).acceptance
        for chunk in (1, 64)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert 0.05 < found[0].law < 0.95
    assert found[0].law == pytest.approx(found[1].law, abs=1e-6)
    assert found[0].greedy == found[1].greedy


def test_greedy_acceptance_is_predicted_where_each_token_is_judged(root: Path) -> None:
    """One draft token per step, on the text that speculation writes: what is predicted is what is measured."""
    ready = point(
        root,
        *("strategy=layer_skip", "draft_length.max=1", "drafter.keep_layers=1"),
        *("workload.max_new_tokens=60", "fidelity.chunk=1"),
    )
    found = measure_point(ready)
    assert found.fidelity is not None
    assert found.fidelity.acceptance is not None
    measured = found.metrics["spec/acceptance_rate_judged"]
    # Steps skip the positions that bonus tokens fill: two shares of about 150 and 180 positions.
    assert found.fidelity.acceptance.greedy == pytest.approx(measured, abs=0.05)
    assert found.metrics["spec/predicted_acceptance_greedy"] == found.fidelity.acceptance.greedy


# --- a run


def test_a_run_reads_what_its_plain_arm_wrote(result: PointResult) -> None:
    found, arms = result.fidelity, result.point.arms
    assert found is not None
    answers = answers_of(result.traces_of(arms.plain))
    assert found.laws[""].num_positions == sum(map(len, answers.values())) == NEW_TOKENS * len(LENGTHS)
    assert found == measure_fidelity({"x": result.point}, answers, ["x"])["x"]
    assert set(found.metrics) <= set(result.metrics)
    for name in ("kl_mean", "floor_kl_mean", "corpus_kl_mean", "corpus_floor_kl_mean", "flips_n"):
        assert f"quality/{name}" in result.metrics
    assert list(result.seconds)[-1] == "measure fidelity"


def test_a_failure_of_it_costs_nothing_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected while reading")

    monkeypatch.setattr(measured_point, "measure_fidelity", fail)
    found = measure_point(point(root, "strategy=prompt_lookup", "workload.limit=1"))
    assert found.fidelity is None
    assert str(found.trouble) == "injected while reading"
    assert found.equivalence == "exact"
    assert "latency/ttft_ms.p50" in found.metrics


def test_a_run_of_another_seed_or_batch_has_the_same_fidelity(root: Path, result: PointResult) -> None:
    more = ["strategy=specdec", f"model.draft={root / 'draft'}", "fidelity.chunk=1", "batch_size=3", "seed=5"]
    found = measure_point(point(root, *rounding(root, *more))).fidelity
    assert found is not None
    assert result.fidelity is not None
    for prefix, laws in result.fidelity.laws.items():
        assert found.laws[prefix].kl_mean == pytest.approx(laws.kl_mean, rel=1e-6, abs=1e-12)


# --- a comparison


@pytest.fixture(scope="module")
def compared(root: Path, one_thread: None) -> ComparisonResult:
    rounded = " ".join(["baseline", *rounding(root)])
    candidates = [rounded, rounded.replace("baseline", "prompt_lookup"), "specdec drafter.weights=plain"]
    return measure_comparison(prepare_comparison("baseline", candidates, shared(root)))


def test_no_drafter_is_built_where_none_has_a_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run, and in a comparison in which another arm's has one."""
    built = []

    def noting(arm: Arm, *arguments: Any) -> Any:
        built.append(arm.drafter.name)
        return build_drafter(arm, *arguments)

    monkeypatch.setattr(arm_fidelity, "build_drafter", noting)
    found = measure_point(point(root, "strategy=prompt_lookup", *rounding(root)))
    assert found.trouble is None
    assert found.fidelity is not None
    candidates = [" ".join(["suffix", *rounding(root)]), "prompt_lookup", "fallback drafter.weights=plain"]
    compared = measure_comparison(prepare_comparison("baseline", candidates, shared(root)))
    assert compared.trouble is None
    assert set(compared.fidelities) == {candidates[0], candidates[2]}
    assert built == ["fallback"]


def test_each_arm_of_a_comparison_has_its_own(compared: ComparisonResult) -> None:
    baseline, rounded, lookup, drafting = compared.comparison.points
    assert compared.trouble is None
    assert set(compared.fidelities) == {rounded, lookup, drafting}
    assert compared.fidelities[rounded] == compared.fidelities[lookup]  # speculation adds nothing
    assert compared.fidelities[rounded].laws[""].kl_mean > 1e-6
    assert compared.fidelities[drafting].laws == {}
    kl = compared.fidelities[rounded].metrics["quality/kl_mean"]
    assert compare_report.arm_metrics(compared, rounded)["quality/kl_mean"] == kl
    assert "quality/kl_mean" not in compare_report.arm_metrics(compared, baseline)
    assert compare_report.arm_metrics(compared, drafting)["spec/predicted_acceptance_greedy"] == 1


def test_a_comparison_tells_it(compared: ComparisonResult) -> None:
    _, rounded, _, drafting = compared.comparison.points
    table = {heading: cells for heading, *cells in compare_report.rows(compared)}
    pair = compared.fidelities[rounded].beside_floor("")
    assert pair is not None
    kl = f"{pair[0].kl_mean:.2g} ({pair[1].kl_mean:.2g})"
    assert table["KL to plain, mean (floor)"] == ["-", kl, kl, "-"]
    top = f"top token as plain's {pair[0].top1_agreement_pct:.1f} %"
    assert compare_report.verdict_line(compared, rounded).endswith(f"; KL to plain {kl}, {top}")
    notes = compare_report.notes(compared)
    assert len([line for line in notes if line.startswith(f"{rounded}, fidelity on ")]) == 2
    assert (
        f"{drafting}, predicted acceptance 1.00 (law), 1.00 (argmax), "
        "measured 1.00 of the draft tokens that were judged" in notes
    )


def test_arms_that_differ_in_dtype_have_references_of_their_own(root: Path) -> None:
    """None of them is lossless and in float32: there is no text of that reference, and the corpus is left."""
    single = " ".join(["baseline", *rounding(root), "dtype=fp32"])
    found = measure_comparison(prepare_comparison("baseline", [single], shared(root)))
    assert set(found.fidelities[single].laws) == {"corpus_", "corpus_floor_"}
    assert 1e-14 < found.fidelities[single].laws["corpus_floor_"].kl_mean < 1e-8
    heading, *_ = (row for row in compare_report.rows(found) if row[0].startswith("KL"))
    assert heading[0] == "KL to plain on the corpus, mean (floor)"


def test_a_shared_setting_is_refused_within_an_arm(root: Path) -> None:
    with pytest.raises(ValueError, match="sets fidelity, which all arms share"):
        prepare_comparison("baseline", ["baseline fidelity.chunk=2"], shared(root))


# --- what a person reads


def laws(**changes: float | None) -> Fidelity:
    one = Fidelity(120, 0.25, 0.125, 2.0, 4.0, 75.0, 9, 1.5, 0.8125)
    return replace(one, **changes)  # type: ignore[arg-type]


FLOOR = laws(kl_mean=0.001, kl_median=0.0, kl_p99=0.01, top1_agreement_pct=99.0, flips_n=1, ppl_ratio=1.0)


def test_every_figure_stands_beside_its_floor() -> None:
    one = ArmFidelity({"": laws(), "floor_": FLOOR}, PredictedAcceptance(0.71, 0.73, 120))
    assert list(fidelity_report.lines(one, {"spec/acceptance_rate_judged": 0.7}, "a, ")) == [
        "a, fidelity on plain's texts: KL 0.25 mean, 0.12 median, 2 p99 (floor 0.001, 0, 0.01); "
        "top token as plain's 75.0 % (99.0 %); 9 flips (1); perplexity 1.500x (1.000x); "
        "expected acceptance 0.812 (0.812); 120 positions",
        "a, predicted acceptance 0.71 (law), 0.73 (argmax), measured 0.70 of the draft tokens that were judged",
    ]
    few = ArmFidelity({"corpus_": laws(kl_p99=None), "corpus_floor_": replace(FLOOR, kl_p99=None)})
    (line,) = fidelity_report.lines(few, {})
    assert line.startswith("fidelity on the corpus: KL 0.25 mean, 0.12 median, 4 max (floor 0.001, 0, 4);")


def test_the_table_of_a_run_has_it_for_arms_that_do_not_keep_the_laws(result: PointResult) -> None:
    table = {heading: cells for heading, *cells in report.point_rows(result)}
    assert result.fidelity is not None
    pair = result.fidelity.beside_floor("")
    assert pair is not None
    kl = f"{pair[0].kl_mean:.2g} ({pair[1].kl_mean:.2g})"
    assert table["KL to plain, mean (floor)"] == [kl, kl, "-"]  # strategy, twin, plain
    assert list(table["top token as plain's (floor)"])[2] == "-"
    assert [line for line in report.notes(result) if line.startswith("predicted acceptance ")]


def test_nothing_measured_is_nothing_told() -> None:
    assert fidelity_report.rows([None, ArmFidelity()]) == []
    assert list(fidelity_report.lines(None, {})) == []
    assert fidelity_report.clause(None) is fidelity_report.clause(ArmFidelity()) is None
