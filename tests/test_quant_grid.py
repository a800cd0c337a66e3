"""`+experiment=quant_grid`, end to end on a tiny model: every combination in one table, one comparison logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_folders import repeating_prompts, save_model, save_prompts

from experiments import overview, run, tracking
from experiments.studies.quant_grid import QuantGridOptions

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (3, 6, 5, 4, 7, 3)
GRID = (
    "experiment.weights=[plain,int8]",
    "experiment.kv=[dense,kv_int8]",
    "experiment.decodings=[baseline,prompt_lookup]",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("grid")
    save_model(root / "target", hidden_size=64, intermediate_size=64, num_attention_heads=4)
    save_prompts(root / "prompts.jsonl", repeating_prompts(LENGTHS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        yield root


def arguments(root: Path, *more: str) -> list[str]:
    return [
        "+experiment=quant_grid",
        f"model.target={root / 'target'}",
        "workload=jsonl",
        f"workload.path={root / 'prompts.jsonl'}",
        "workload.max_new_tokens=12",
        "dtype=bf16",
        "threads=1",
        "measure.ceilings=skip",
        "fidelity.corpus_tokens=20",
        *more,
    ]


def test_every_combination_is_a_row_of_one_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments(root, *GRID)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    (plan,) = (
        line for line in shown.out.splitlines() if line.startswith("weights    baseline weights=int8, ")
    )
    assert "% of" in plan
    assert "bits a weight with scales" in plan
    store = tracking.open_store(root)
    found = tracking.find_runs(store, "quant_grid")
    (report,) = (one for one in found if one.tags["kind"] == "report")
    arms = {one.name: one for one in found if one.tags["kind"] == "point"}
    expected = {
        f"{decoding}{weights}{kv}"
        for decoding in ("baseline", "prompt_lookup")
        for weights in ("", " weights=int8")
        for kv in ("", " kv=kv_int8")
    }
    assert set(arms) == expected
    assert {one.tags["sweep_id"] for one in found} == {report.tags["sweep_id"]}
    kernels = {one.params.get("weights.kernel") for one in found if one.tags.get("weights") == "int8"}
    assert kernels <= {"torch_int8pack", "onednn_u8s8"}
    assert len(kernels) == 1
    text = tracking.read_text(store, report.run_id, "report.md")
    assert f"| {' | '.join(overview.HEADING)} |" in text
    lines = {line.split(" | ")[0].lstrip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert expected <= set(lines)
    for label, arm in arms.items():
        loses = "=" in label
        assert ("quality/kl_mean" in arm.metrics) == loses
        assert arm.tags["lossless"] == str(not loses).lower()
        # Speculation is graded against the arm with the same weights and cache, which is in the grid.
        assert (arm.tags["equivalence"] == "n/a") == label.startswith("baseline")
    # What the weights and the cache lost is the same with and without speculation.
    for parts in (" weights=int8", " kv=kv_int8", " weights=int8 kv=kv_int8"):
        plain, speculative = (arms[f"{decoding}{parts}"] for decoding in ("baseline", "prompt_lookup"))
        assert plain.metrics["quality/kl_mean"] == speculative.metrics["quality/kl_mean"]


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (["weights=int8"], ("weights=int8", "experiment.weights=[...]")),
        (["strategy=specdec"], ("strategy=specdec", "experiment.decodings=[...]")),
        (["draft_length.max=3"], ("draft_length.max=3",)),
        (["experiment.weights=[]"], ("experiment.weights=[]", "at least one")),
        (["experiment.weights=[int9]"], ("int9", "known: ", "int8")),
        (["experiment.kv=[sparse]"], ("sparse", "known: ", "kv_int8")),
        (["experiment.decodings=[guess]"], ("guess", "known: ", "prompt_lookup")),
        (["experiment.bits=4"], ("bits", "decodings")),
        (
            ["experiment.weights=[plain]", "experiment.kv=[dense]", "experiment.decodings=[baseline]"],
            ("the baseline only",),
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    root: Path, capsys: pytest.CaptureFixture[str], more: list[str], mentions: tuple[str, ...]
) -> None:
    assert run.main(arguments(root, "study=bad", *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for mention in mentions:
        assert mention in line
    assert tracking.find_runs(tracking.open_store(root), "bad") == []


def test_an_unknown_experiment_is_named_beside_the_known_ones(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["+experiment=nonesuch"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nonesuch" in line
    assert "quant_grid" in line


def test_the_default_grid_is_4_weights_by_3_caches_by_3_decodings() -> None:
    grid = QuantGridOptions()
    assert len(list(grid._combinations())) == 36
