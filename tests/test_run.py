"""`python -m experiments.run`, end to end, on tiny real models: what it logs, prints, and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_folders import repeating_prompts, save_model, save_prompts, save_tokenizer
from toy_models import CONTEXT_LENGTH

from experiments import ceilings_store, equivalence, hardware, measure, record, run, tracking
from experiments.load import ForeignLoad
from experiments.statistics import FASTER, NO_DIFFERENCE, SLOWER, TOO_FEW
from experiments.tracking import StoredRun

CHECKOUT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 20
PROMPT_LENGTHS = (3, 6, 5)

# METRICS.md section 5, as far as this stage measures it. Dashboards and comparisons read these names.
ARM_METRICS = {
    *(f"latency/ttft_ms.{stat}" for stat in ("p50", "p90", "mean", "n")),
    *(f"latency/itl_ms.{stat}" for stat in ("p50", "p90", "max", "mean", "n")),
    *(f"latency/tpot_ms.{stat}" for stat in ("p50", "mean", "n")),
    *(f"latency/step_gap_ms.{stat}" for stat in ("p50", "max", "n")),
    "latency/tokenize_ms.mean",
    "latency/queue_ms.mean",
    "latency/total_s.mean",
    "throughput/decode_tok_s_request.mean",
    "throughput/decode_tok_s_aggregate",
    "throughput/prefill_tok_s",
    "passes/target",
    "passes/draft",
    "spec/tokens_per_pass",
    "memory/weights_mib",
    "memory/weights_read_mib",
    "memory/kv_mib",
    "memory/kv_allocated_mib",
    "memory/kv_bytes_per_token",
    "memory/quantized_share",
    "memory/bits_per_weight",
    "trace/step_ms",
}
SPEEDUPS = {f"speedup/{kind}_vs_{role}" for kind in ("decode", "total") for role in ("plain", "twin")}
COMPARED_METRICS = {*SPEEDUPS, "quality/exact_match_pct", "quality/near_tie_n", "quality/diverged_n"}
SPECULATIVE_METRICS = {
    "spec/drafted",
    "spec/accepted",
    "spec/acceptance_rate",
    "spec/acceptance_rate_judged",
    *(f"spec/accept_pos_{position}" for position in range(1, 5)),
    "spec/draft_ms.mean",
    "spec/verify_ms.mean",
    "spec/overhead_ms.mean",
    "spec/predicted_speedup",
}
DRAFT_MODEL_METRICS = {f"spec/predicted_acceptance{end}" for end in ("", "_greedy", "_n")}
FIDELITY_METRICS = {
    f"quality/{prefix}{name}"
    for prefix in ("", "floor_", "corpus_", "corpus_floor_")
    for name in (
        *("kl_mean", "kl_median", "kl_max", "kl_n"),
        *("top1_agreement_pct", "flips_n", "ppl_ratio", "expected_acceptance"),
    )
}
# What a run has that skips nothing and has at least 100 steps and 6 pairs of texts.
FULL_METRICS = {
    "latency/itl_ms.p99",
    "latency/step_gap_ms.p99",
    *(f"{name}.{end}" for name in {*SPEEDUPS, "noise/again_vs_itself"} for end in ("ci_low", "ci_high")),
    "noise/again_vs_itself",
    *(f"memory/{kind}_mib" for kind in ("peak", "steady", "base")),
    *(f"memory/peak_{phase}_mib" for phase in ("load", "prefill")),
    "roofline/mbu_target_pct",
    "roofline/mbu_draft_pct",
    "roofline/mfu_prefill_pct",
    "roofline/floor_ms",
    *(
        f"roofline/{model}_{part}"
        for model in ("target", "draft")
        for part in ("pass_ms.mean", "kv_ms", "overhead_ms", "rest_ms")
    ),
}
# The share of drafts accepted if the one before was: only of positions that were ever reached.
CONDITIONAL = ("spec/accept_cond_", "spec/break_even_acceptance", "memory/peak_decode_mib")
TAGS = {
    "kind",
    "strategy",
    "variant",
    "model",
    "draft",
    "weights",
    "kv",
    "dtype",
    "device",
    "kernels",
    "workload",
    "batch_size",
    "lossless",
    "equivalence",
    "validity",
    "config_hash",
    "workload_hash",
    "git_commit",
    "git_dirty",
    "metrics_version",
}
REAL_PNG = record.png
SPEED_SECTIONS = ("latency/", "throughput/", "speedup/", "spec/", "trace/", "roofline/", "noise/")
# Most runs here leave out what takes time and has tests of its own.
BRIEF = {"measure.aa": "false", "measure.ceilings": "skip", "measure.memory": "false"}
FULL = {"measure.aa": "true", "measure.ceilings": "auto", "measure.memory": "true"}


@dataclass(frozen=True)
class Workplace:
    """Folders with models and prompts, and a store for this module's runs."""

    root: Path
    store: tracking.Store

    def arguments(self, *more: str) -> list[str]:
        """The smallest real run, with what is given added or replaced."""
        base = {
            "model.target": f"{self.root / 'target'}",
            "workload": "jsonl",
            "workload.path": f"{self.root / 'prompts.jsonl'}",
            "workload.max_new_tokens": str(NEW_TOKENS),
            "dtype": "fp32",
            "threads": "1",
            **BRIEF,
        }
        given = {argument.partition("=")[0] for argument in more}
        kept = [f"{key}={value}" for key, value in base.items() if key not in given]
        return [*more, *kept]

    def newest(self, kind: str = "point") -> StoredRun:
        return self.runs(kind)[0]

    def runs(self, kind: str) -> list[StoredRun]:
        """Newest first."""
        return tracking.find_runs(self.store, "inference", f"tags.kind = '{kind}'")

    def run_ids(self) -> set[str]:
        return {found.run_id for found in tracking.find_runs(self.store, "inference")}

    def artifact(self, found: StoredRun, path: str) -> str:
        return tracking.read_text(self.store, found.run_id, path)

    def images(self, found: StoredRun) -> list[str]:
        listed = self.store.client.list_artifacts(found.run_id, "plots")
        return sorted(Path(one.path).name for one in listed)

    def image(self, found: StoredRun, path: str) -> bytes:
        return Path(self.store.client.download_artifacts(found.run_id, path)).read_bytes()

    def json_lines(self, found: StoredRun, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.artifact(found, path).splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("run")
    save_model(root / "target")
    save_model(root / "draft", seed=1)
    save_prompts(root / "prompts.jsonl", repeating_prompts(PROMPT_LENGTHS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        patch.setattr(record, "png", lambda figure: b"an image")  # half a second a run; drawn for real below
        yield Workplace(root, tracking.open_store(root))


# --- what a run leaves behind


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        ("baseline",),
        ("no_cache",),
        ("specdec", "model.draft={root}/draft"),
        ("specdec", "drafter.weights=plain"),
        ("prompt_lookup",),
    ],
    ids=["baseline", "no_cache", "specdec-draft", "specdec-self", "prompt_lookup"],
)
def test_a_strategy_is_measured_compared_and_logged(
    place: Workplace, capsys: pytest.CaptureFixture[str], strategy: tuple[str, ...], batch_size: int
) -> None:
    name, *overrides = (part.format(root=place.root) for part in strategy)
    status = run.main(place.arguments(f"strategy={name}", f"batch_size={batch_size}", *overrides))
    shown = capsys.readouterr()
    assert (status, shown.err.strip()) == (0, "")
    found = place.newest()
    assert found.run_id in shown.out
    assert found.status == "FINISHED"
    assert set(found.tags) >= TAGS
    is_speculative = name in ("specdec", "prompt_lookup")
    is_compared = name != "baseline"
    assert {key: found.tags[key] for key in ("kind", "strategy", "batch_size", "lossless")} == {
        "kind": "point",
        "strategy": name,
        "batch_size": str(batch_size),
        "lossless": "true",
    }
    assert found.tags["equivalence"] == ("exact" if is_compared else "n/a")
    assert (found.tags["drafter"] != "none") == (found.tags["verifier"] != "none") == is_speculative
    assert found.tags["validity"] in ("ok", "noisy")  # whatever else the machine does
    expected = ARM_METRICS | (COMPARED_METRICS if is_compared else set())
    expected |= SPECULATIVE_METRICS if is_speculative else set()
    expected |= DRAFT_MODEL_METRICS if name == "specdec" else set()
    assert {name for name in found.metrics if not name.startswith(CONDITIONAL)} == expected
    assert found.tags.get("verdict") == (TOO_FEW if is_compared else None)
    if is_compared:
        assert found.metrics["quality/exact_match_pct"] == 100
    assert found.params["batch_size"] == str(batch_size)
    assert found.params["model.target"] == str(place.root / "target")


def test_a_draft_that_is_the_target_is_always_accepted(place: Workplace) -> None:
    assert run.main(place.arguments("strategy=specdec", "drafter.weights=plain")) == 0
    metrics = place.newest().metrics
    assert metrics["spec/acceptance_rate"] == 1
    assert metrics["spec/tokens_per_pass"] > 3
    assert metrics["passes/draft"] > metrics["passes/target"]


class QuietMeter:
    """A LoadMeter on a machine that does nothing else."""

    def read(self) -> ForeignLoad:
        return ForeignLoad(0.0)


def test_a_run_that_skips_nothing(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings_store, "LoadMeter", QuietMeter)
    monkeypatch.setattr(record, "png", REAL_PNG)
    everything = [f"{setting}={value}" for setting, value in FULL.items()]
    draft = f"model.draft={place.root / 'draft'}"
    assert run.main(place.arguments("strategy=specdec", draft, "measure.repeats=5", *everything)) == 0
    shown = capsys.readouterr()
    assert shown.err.strip() == ""
    found = place.newest()
    logged = {name for name in found.metrics if not name.startswith(CONDITIONAL)}
    speculative = SPECULATIVE_METRICS | DRAFT_MODEL_METRICS
    assert logged == ARM_METRICS | COMPARED_METRICS | speculative | FULL_METRICS
    assert set(found.tags) >= TAGS | {"ceilings", "verdict", "foreign_cores"}
    assert found.tags["validity"] in ("ok", "noisy")  # whatever else the machine does
    verdicts = (FASTER, SLOWER, NO_DIFFERENCE) if found.tags["validity"] == "ok" else ("noisy",)
    assert found.tags["verdict"] in verdicts
    metrics = found.metrics
    assert metrics["memory/peak_mib"] >= metrics["memory/steady_mib"] >= metrics["memory/base_mib"] > 0
    assert metrics["latency/ttft_ms.n"] == 5 * len(PROMPT_LENGTHS)

    (ceilings,) = (one for one in place.runs("ceilings") if one.run_id == found.tags["ceilings"])
    assert (ceilings.status, ceilings.tags["validity"]) == ("FINISHED", "ok")
    assert set(ceilings.metrics) == {"ceilings/read_gb_s", "ceilings/gemm_gflop_s"}
    assert min(ceilings.metrics.values()) > 0
    floor_ms = metrics["memory/weights_read_mib"] * 2**20 / ceilings.metrics["ceilings/read_gb_s"] / 1e6
    assert metrics["roofline/floor_ms"] == pytest.approx(floor_ms)

    machine = json.loads(place.artifact(found, "env/environment.json"))
    assert set(machine) >= {"cpu", "packages", "clocks", "clocks_after", "load", "energy_j"}
    assert f"{machine['load']['foreign_cores']:.2f}" == found.tags["foreign_cores"]
    assert set(machine["clocks_after"]) == set(machine["clocks"])
    for figure in ("timeline", "step_gaps", "roofline", "acceptance"):
        assert place.image(found, f"plots/{figure}.png").startswith(b"\x89PNG\r\n\x1a\n")
    report = place.artifact(found, "report.md")
    for words in (
        "specdec, a draft pass: ",
        "noise: reference against itself ",
        "memory of the strategy alone",
    ):
        assert words in report
        assert words in shown.out
    for arm in ("specdec", "reference"):
        assert f"## {arm}: passes" in report
        assert f"## {arm}: as other tools define the same figures" in report


def test_a_quantized_run_logs_and_shows_its_fidelity_beside_the_floor(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["strategy=baseline", "weights=int8", "dtype=bf16", "fidelity.corpus_tokens=20"]
    assert run.main(place.arguments(*arguments)) == 0
    shown = capsys.readouterr().out
    found = place.newest()
    logged = {name for name in found.metrics if name.startswith("quality/")}
    assert (
        logged - {"quality/exact_match_pct", "quality/near_tie_n", "quality/diverged_n"} == FIDELITY_METRICS
    )
    assert found.metrics["quality/corpus_kl_n"] == 20
    assert found.metrics["quality/kl_mean"] > 0
    assert found.tags["lossless"] == "false"
    for text in (shown, place.artifact(found, "report.md")):
        assert "KL to plain, mean (floor)" in text
        assert "fidelity on the corpus: KL " in text
        assert ", measure fidelity " in text


def test_ceilings_are_measured_once_then_looked_up(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_store, "LoadMeter", QuietMeter)
    monkeypatch.setattr(hardware, "gemm_gflop_s", lambda *_: 64.0)
    monkeypatch.setattr(hardware, "pass_ms", lambda *_: 0.125)
    rates = iter((8.0, 16.0))
    monkeypatch.setattr(hardware, "read_gb_s", lambda *_: next(rates))

    def floor_and_ceilings(ceilings: str) -> tuple[float, str]:
        # In a dtype that no other test here measures.
        brief = ("workload.limit=1", "dtype=fp64", f"measure.ceilings={ceilings}")
        assert run.main(place.arguments("strategy=baseline", *brief)) == 0
        found = place.newest()
        return found.metrics["roofline/floor_ms"], found.tags["ceilings"]

    floor_ms, first = floor_and_ceilings("auto")
    assert floor_and_ceilings("auto") == (floor_ms, first)
    refreshed_ms, second = floor_and_ceilings("refresh")
    assert second != first
    assert refreshed_ms == floor_ms / 2
    assert floor_and_ceilings("auto") == (refreshed_ms, second)
    assert place.images(place.newest()) == ["roofline.png", "step_gaps.png", "timeline.png"]


def test_a_plan_of_quantized_weights_is_printed_and_logged(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels that execute, of target and draft, in the tags too; what came before any timing apart."""
    weights = ("weights=int8", "weights.kernel=torch_int8pack", "weights.keep=[*.down_proj]")
    assert run.main(place.arguments("strategy=specdec", "drafter.weights=quanto_int8", *weights)) == 0
    shown = capsys.readouterr().out
    assert "weights of the target" in shown
    assert "model.layers.*.mlp.down_proj" in shown
    assert "weights.keep" in shown
    assert "first use, not in any timing: " in shown
    # of the draft, which is dequantized: nothing is said of the target's
    assert "no exactness is claimed" not in shown
    found = place.newest()
    assert found.tags["kernels"] == "torch int8pack, quanto: dequantized at each product"
    assert (found.tags["equivalence"], found.tags["lossless"]) == ("exact", "false")
    target = place.artifact(found, "config/weights_target.md")
    assert "| model.layers.*.self_attn.q_proj | 2 | 32 x 32 | torch int8pack |" in target
    assert "| model.layers.*.mlp.down_proj | 2 | 32 x 48 | plain | 32.00 | weights.keep |" in target
    assert "quanto: dequantized at each product" in place.artifact(found, "config/weights_draft.md")
    assert 8 < found.metrics["memory/bits_per_weight"] < 32


def test_the_kernels_that_were_chosen_are_in_the_configuration(place: Workplace) -> None:
    assert run.main(place.arguments("strategy=specdec", "weights=int8", "drafter.weights=int8")) == 0
    found = place.newest()
    resolved = yaml.safe_load(place.artifact(found, "config/resolved.yaml"))
    kernel = resolved["weights"]["kernel"]
    assert kernel in ("torch_int8pack", "onednn_u8s8")
    assert found.params["weights.kernel"] == kernel
    assert found.params["drafter.weights"] == resolved["drafter"]["weights"] == f"int8 kernel={kernel}"
    assert found.tags["draft"].endswith("target int8")
    for role in ("target", "draft"):  # and by what
        assert "kernels by their cost" in place.artifact(found, f"config/weights_{role}.md")


def test_weights_whose_products_depend_on_batch_mates_claim_no_exactness(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:  # Q5
    assert run.main(place.arguments("strategy=prompt_lookup", "weights=bnb_int8")) == 0
    assert "(bitsandbytes LLM.int8), so speculation's text need not be its twin's" in capsys.readouterr().out


def test_the_artifacts_tell_the_whole_run(place: Workplace) -> None:
    assert run.main(place.arguments("strategy=prompt_lookup", "drafter.max_ngram=2", "seed=3")) == 0
    found = place.newest()
    resolved = yaml.safe_load(place.artifact(found, "config/resolved.yaml"))
    assert resolved["drafter"] == {
        "name": "prompt_lookup",
        "min_ngram": 1,
        "max_ngram": 2,
        "prefer": "recent",
    }
    assert (resolved["seed"], resolved["dtype"], resolved["device"], resolved["threads"]) == (
        3,
        "fp32",
        "cpu",
        1,
    )
    assert json.loads(place.artifact(found, "env/environment.json"))["torch_threads"] == 1
    assert "| output against its twin | exact | - |" in place.artifact(found, "report.md")
    assert "| output against its twin | exact | - |" in found.tags["mlflow.note.content"]

    # Ceilings are skipped here.
    assert "ceilings" not in found.tags
    assert place.images(found) == ["acceptance.png", "step_gaps.png", "timeline.png"]

    outputs = place.json_lines(found, "outputs/tokens.jsonl")
    texts = {
        arm: [o["token_ids"] for o in outputs if o["arm"] == arm] for arm in ("prompt_lookup", "reference")
    }
    assert len(outputs) == 2 * len(PROMPT_LENGTHS)
    assert texts["prompt_lookup"] == texts["reference"]
    assert all(1 <= len(text) <= NEW_TOKENS for text in texts["reference"])

    events = place.json_lines(found, "trace/events.jsonl")
    assert {event["event"] for event in events} == {"block", "step", "pass", "proposal"}
    committed = [
        token
        for event in events
        if event["event"] == "step" and event["arm"] == "prompt_lookup"
        for tokens in event["committed"]
        for token in tokens
    ]
    assert sorted(committed) == sorted(token for text in texts["prompt_lookup"] for token in text)


def test_another_working_directory_has_the_same_store(place: Workplace, tmp_path: Path) -> None:
    before = place.run_ids()
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", *place.arguments("strategy=baseline", "workload.limit=1")],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    new = place.run_ids() - before
    assert len(new) == 1
    assert new.pop() in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- bad input: one line, an exit status, and no run that claims to have finished


def _other_size(root: Path) -> list[str]:
    return [f"model.draft={save_model(root / 'other_size', vocab_size=37, eos_token_id=36)}"]


def _other_words(root: Path) -> list[str]:
    save_tokenizer(save_model(root / "other_words"), prefix="v")
    return [f"model.draft={root / 'other_words'}"]


def _bloom(root: Path) -> Path:
    """Its attention adds a bias to the scores (ALiBi), which the engine does not know."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2, bos_token_id=60, eos_token_id=60)
    BloomForCausalLM(config).save_pretrained(root / "bloom")
    save_tokenizer(root / "bloom")
    return root / "bloom"


def _empty_workload(root: Path) -> list[str]:
    (root / "empty.jsonl").write_text("")
    return [f"workload.path={root / 'empty.jsonl'}"]


def _folder_without_model(root: Path) -> list[str]:
    (root / "no_model").mkdir(exist_ok=True)
    return [f"model.target={root / 'no_model'}"]


BAD_INPUT: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown strategy": (["strategy=specdek"], ("specdek", "baseline", "specdec", "prompt_lookup")),
    "unknown key": (["batchsize=2"], ("batchsize", "batch_size")),
    "unknown nested key": (["draft_length.maxx=3"], ("draft_length.maxx", "max")),
    "unknown added key": (["+measure.often=3"], ("measure.often", "repeats", "warmup")),
    "wrong type": (["batch_size=four"], ("batch_size", "four")),
    "not an override": (["specdec"], ("'specdec'", "key=value")),
    "too long": (
        [f"workload.max_new_tokens={CONTEXT_LENGTH}"],
        ("prompt 2", f"{2 * max(PROMPT_LENGTHS)} tokens", f"context of {CONTEXT_LENGTH}"),
    ),
    "a draft model where the target drafts": (
        ["strategy=self_int4", "model.draft=some/folder"],
        ("model.draft=some/folder", "drafter.model=target", "drafter.model=draft"),
    ),
    "draft of another vocabulary size": (_other_size, ("model.draft", "37", "61")),
    "draft of another vocabulary": (_other_words, ("model.draft", "another vocabulary")),
    "draft of an unknown family": (
        lambda root: [f"model.draft={_bloom(root)}"],
        ("model.draft", "bloom", "llama"),
    ),
    "draft with a shorter context": (
        lambda root: [f"model.draft={save_model(root / 'short', max_position_embeddings=16)}"],
        ("model.draft", "16"),
    ),
    "missing file": (["workload.path=/nowhere.jsonl"], ("workload.path", "/nowhere.jsonl")),
    "empty workload": (_empty_workload, ("empty.jsonl", "no prompts")),
    "no batch": (["batch_size=0"], ("batch_size=0",)),
    "top_k below 0": (["sampling.top_k=-1"], ("sampling.top_k=-1: expected at least 0",)),
    "temperature below 0": (["sampling.temperature=-1"], ("sampling.temperature=-1",)),
    "temperature that overflows": (["sampling.temperature=1e-40"], ("temperature=1e-40",)),
    "folder without a model": (_folder_without_model, ("model.target", "no_model")),
    "unknown weights": (["weights=int5"], ("int5", "bnb_nf4", "plain")),
    "unknown draft weights": (["drafter.weights=int5"], ("int5", "bnb_nf4", "plain")),
    "unknown drafter": (["drafter=oracle"], ("oracle", "draft_model", "prompt_lookup")),
    "unknown verifier": (["verifier=hope"], ("hope", "token")),
    "unknown draft length": (["draft_length=long"], ("long", "fixed")),
    "unknown drafter of a baseline": (
        ["strategy=baseline", "drafter=oracle"],
        ("oracle", "draft_model", "prompt_lookup"),
    ),
    "drafter of a baseline": (["strategy=baseline", "drafter=prompt_lookup"], ("prompt_lookup",)),
    "option of a part that is not there": (["strategy=baseline", "draft_length.max=3"], ("draft_length",)),
    "deleted group": (["~weights"], ("weights",)),
    "family not supported": (lambda root: [f"model.target={_bloom(root)}"], ("bloom", "llama")),
    "weights that don't fit the model": (
        ["weights=bnb_nf4", "weights.keep=[nothing]"],
        ("weights=bnb_nf4: weights.keep=nothing", "lm_head"),
    ),
    "a KV store that can't hold a pass": (
        ["strategy=prompt_lookup", "kv=kv_int4", "kv.tail=3"],
        ("kv.tail=3", "at least 5"),
    ),
    "study that is no name": (["study=.."], ("'..'",)),
    "missing plug-in": (["plugin=/nowhere.py"], ("plugin=/nowhere.py",)),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(place: Workplace, capsys: pytest.CaptureFixture[str], case: str) -> None:
    overrides, mentions = BAD_INPUT[case]
    overrides = overrides(place.root) if callable(overrides) else overrides
    before = place.run_ids()
    capsys.readouterr()
    status = run.main(place.arguments(*_with_strategy(overrides)))
    shown = capsys.readouterr().err
    assert status != 0
    lines = [line for line in shown.splitlines() if line.strip()]
    assert len(lines) == 1, shown
    assert lines[0].startswith("error: ")
    for mention in mentions:
        assert mention in lines[0]
    new = [found for found in tracking.find_runs(place.store, "inference") if found.run_id not in before]
    assert all(found.status == "FAILED" for found in new)


def test_a_store_that_cannot_be_opened_is_one_clear_line(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/store.db")
    assert run.main(place.arguments("strategy=baseline")) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: can't open the experiment store")


def _with_strategy(overrides: list[str]) -> list[str]:
    if any(override.startswith("strategy=") for override in overrides):
        return overrides
    return ["strategy=specdec", *overrides]


# --- a failure while measuring


@pytest.mark.parametrize(
    ("error", "validity"),
    [(RuntimeError("injected while decoding"), "failed"), (MemoryError("injected"), "oom")],
)
def test_a_failure_while_measuring_leaves_no_speed(
    place: Workplace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    validity: str,
) -> None:
    whole, calls = measure._decode, iter(range(100))

    def failing(*arguments: Any) -> None:
        if next(calls) == 2:  # two blocks were measured well before
            raise error
        whole(*arguments)

    monkeypatch.setattr(measure, "_decode", failing)
    assert run.main(place.arguments("strategy=prompt_lookup")) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "injected" in shown
    found = place.newest()
    assert (found.status, found.tags["validity"]) == ("FAILED", validity)
    assert not [name for name in found.metrics if name.startswith(SPEED_SECTIONS)]
    assert "injected" in place.artifact(found, "error.txt")


def test_what_was_measured_survives_a_failing_comparison(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("injected while comparing")

    monkeypatch.setattr(equivalence, "compare_block", failing)
    assert run.main(place.arguments("strategy=prompt_lookup")) == 1
    found = place.newest()
    assert found.status == "FAILED"
    assert place.json_lines(found, "outputs/tokens.jsonl")
    assert place.json_lines(found, "trace/events.jsonl")
    assert yaml.safe_load(place.artifact(found, "config/resolved.yaml"))["strategy"] == "prompt_lookup"


def test_a_result_is_shown_before_the_store_can_fail(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("injected: no space left")

    monkeypatch.setattr(record, "record_result", failing)
    assert run.main(place.arguments("strategy=prompt_lookup")) == 1
    assert "TPOT, median ms" in capsys.readouterr().out
    assert place.newest().status == "FAILED"


@pytest.mark.parametrize(
    ("signal_number", "status", "word", "ceilings"),
    [(signal.SIGINT, 130, "interrupted", "skip"), (signal.SIGTERM, 143, "terminated", "refresh")],
    ids=["interrupted", "terminated-while-measuring-ceilings"],
)
def test_a_signal_leaves_a_killed_run_and_a_line(
    place: Workplace, signal_number: int, status: int, word: str, ceilings: str
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "experiments.run",
            *place.arguments("strategy=baseline", "measure.repeats=100000", f"measure.ceilings={ceilings}"),
        ],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("memory"):  # loaded: the run is open, ceilings or arms are being measured
                break
        process.send_signal(signal_number)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert shown.splitlines()[-1].startswith(f"{word}: ")
    found = place.newest()
    assert (found.status, found.tags["validity"]) == ("KILLED", "interrupted")
    assert not [one for one in place.runs("ceilings") if one.status == "RUNNING"]
