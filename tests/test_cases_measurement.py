"""Faults that other benchmarks shipped (M1 to M9, M16), each on the smallest input that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from toy_clock import Clock, SimulatedRunner
from toy_engine import build_decoder, chain
from toy_folders import repeating_prompts, save_model, save_prompts
from toy_traces import forward, step, timeline, trace
from transformers import AutoModelForCausalLM

from experiments import compare, environment, metrics, run, statistics, tracking
from experiments.config import compose_run
from experiments.measure import measure
from experiments.measured_point import measure_point
from experiments.metrics import request_metrics
from experiments.point import PreparedPoint, prepare
from experiments.report import notes
from experiments.trace import timelines
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.sampling import Sampler
from specdec.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
MS = 1000.0


def test_m1_tokens_are_counted_not_commits() -> None:
    blocks = trace(
        step(0.0, 1.0, "prefill", {0: [1]}),
        step(1.0, 1.5, "verify", {0: [2, 3, 4, 5]}, drafted=[3], accepted=[3]),
        step(1.5, 2.0, "verify", {0: [6, 7, 8, 9]}, drafted=[3], accepted=[3]),
    )
    found = metrics.arm_metrics([blocks])
    assert found["throughput/decode_tok_s_request.mean"] == 8.0
    assert found["throughput/decode_tok_s_aggregate"] == 8.0
    assert found["latency/tpot_ms.mean"] == found["latency/itl_ms.p50"] == 125.0
    assert found["latency/itl_ms.n"] == 8
    assert found["spec/tokens_per_pass"] == 4.0


def test_m2_time_to_the_first_token_is_in_no_gap() -> None:
    slow_start = trace(
        step(0.0, 9.0, "prefill", {0: [1]}),
        step(9.0, 9.5, "decode", {0: [2]}),
        step(9.5, 9.75, "decode", {0: [3]}),
    )
    (request,) = map(request_metrics, timelines(slow_start))
    assert request.itl_ms == request.step_gaps_ms == (500.0, 250.0)
    found = metrics.arm_metrics([slow_start])
    assert found["latency/itl_ms.max"] == found["latency/step_gap_ms.max"] == 500.0
    assert found["latency/itl_ms.mean"] == found["latency/tpot_ms.mean"] == 375.0


def test_m3_token_ids_are_counted_not_text() -> None:
    """A hundred spaces, which any tokenizer would read back as fewer tokens."""
    space = 5
    spaces = trace(
        step(0.0, 1.0, "prefill", {0: [space]}),
        step(1.0, 2.0, "verify", {0: [space] * 99}, drafted=[98], accepted=[98]),
    )
    (found,) = timelines(spaces)
    assert found.num_tokens == 100
    assert request_metrics(found).tpot_ms == MS / 99
    assert metrics.throughput([spaces])["throughput/decode_tok_s_aggregate"] == 99.0


def test_m4_phases_are_measured_not_subtracted() -> None:
    """The prefill of one repeat takes longer than all of the other: a difference of means would be negative."""
    noisy = [
        trace(
            step(0.0, 8.0, "prefill", {0: [1]}),
            step(8.0, 9.0, "verify", {0: [2, 3]}, drafted=[1], accepted=[1]),
            passes=[forward("prefill", 0.0, 8.0, [4]), forward("verify", 8.5, 8.75, [2])],
            proposals=[(8.0, 8.5)],
        ),
        trace(
            step(0.0, 0.25, "prefill", {0: [1]}),
            step(0.25, 0.75, "verify", {0: [2, 3]}, drafted=[1], accepted=[1]),
            passes=[forward("prefill", 0.0, 0.25, [4]), forward("verify", 0.25, 0.75, [2])],
            proposals=[(0.25, 0.25)],
            repeat=1,
        ),
    ]
    found = metrics.arm_metrics(noisy)
    assert found["latency/ttft_ms.mean"] == 4125.0
    assert found["spec/draft_ms.mean"] == 250.0
    assert found["spec/verify_ms.mean"] == 375.0
    assert found["spec/overhead_ms.mean"] == 125.0
    assert found["throughput/decode_tok_s_aggregate"] == 4 / 1.5
    assert min(found.values()) >= 0


@pytest.mark.parametrize(
    ("times", "tpot_ms", "itl_ms"),
    [([4.0], None, ()), ([4.0, 4.5], 500.0, (500.0,)), ([4.0, 4.5, 4.75], 375.0, (500.0, 250.0))],
    ids=["N=1", "N=2", "N=3"],
)
def test_m5_one_two_and_three_tokens(
    times: Sequence[float], tpot_ms: float | None, itl_ms: tuple[float, ...]
) -> None:
    request = request_metrics(timeline(times))
    assert (request.ttft_ms, request.tpot_ms, request.itl_ms) == (4000.0, tpot_ms, itl_ms)
    steps = [step(0.0, times[0], "prefill", {0: [1]})]
    steps += [step(a, b, "decode", {0: [1]}) for a, b in pairwise(times)]
    found = metrics.arm_metrics([trace(*steps)])
    assert found.get("latency/tpot_ms.mean") == tpot_ms
    assert ("throughput/decode_tok_s_request.mean" in found) is (tpot_ms is not None)


def test_m6_a_long_prompt_is_not_in_the_decode_rate() -> None:
    found = metrics.arm_metrics(
        [
            trace(
                step(0.0, 64.0, "prefill", {0: [1]}),
                step(64.0, 64.5, "decode", {0: [2]}),
                step(64.5, 65.0, "decode", {0: [3]}),
                passes=[
                    forward("prefill", 0.0, 64.0, [4096]),
                    forward("decode", 64.0, 64.5),
                    forward("decode", 64.5, 65.0),
                ],
            )
        ]
    )
    assert found["throughput/decode_tok_s_request.mean"] == 2.0
    assert found["throughput/decode_tok_s_aggregate"] == 2.0
    assert found["throughput/prefill_tok_s"] == 64.0
    assert found["latency/ttft_ms.mean"] == 64_000.0


# --- M7: what failed has no figures, and what did not fail has them


@dataclass(frozen=True)
class Workplace:
    root: Path
    store: tracking.Store

    def settings(self, model: str = "target") -> list[str]:
        return [
            f"model.target={self.root / model}",
            "workload=jsonl",
            f"workload.path={self.root / 'prompts.jsonl'}",
            "workload.max_new_tokens=20",
            "measure.memory=false",
            "measure.ceilings=skip",
            "measure.warmup=0",
            "measure.aa=false",
            "dtype=fp32",
            "threads=1",
        ]

    def runs(self, study: str) -> dict[str, tracking.StoredRun]:
        """Points by strategy, and the report."""
        found = tracking.find_runs(self.store, study)
        return {one.tags.get("strategy", one.tags["kind"]): one for one in found}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("cases")
    save_model(root / "target")
    save_prompts(root / "prompts.jsonl", repeating_prompts([3]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'store.db'}")
        yield Workplace(root, tracking.open_store(root))


SPEED_SECTIONS = ("latency/", "throughput/", "speedup/", "spec/", "trace/", "roofline/", "compare/")


def speeds(found: tracking.StoredRun) -> list[str]:
    return [name for name in found.metrics if name.startswith(SPEED_SECTIONS)]


def break_prompt_lookup(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(PromptLookupDrafter, "propose", failing)


def test_m7_a_point_that_fails_has_no_speed_and_the_sweep_goes_on(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_prompt_lookup(monkeypatch, MemoryError("injected"))
    status = run.main(["-m", "strategy=prompt_lookup,baseline", "study=sweep", *place.settings()])
    shown = capsys.readouterr()
    found = place.runs("sweep")
    assert status == 1
    assert (found["prompt_lookup"].status, found["prompt_lookup"].tags["validity"]) == ("FAILED", "oom")
    assert speeds(found["prompt_lookup"]) == []
    assert found["baseline"].status == "FINISHED"
    assert found["baseline"].tags["validity"] in ("ok", "noisy")
    assert found["baseline"].metrics["throughput/decode_tok_s_aggregate"] > 0
    assert found["report"].tags["validity"] == "failed"
    assert "failed: point 1 (strategy=prompt_lookup): MemoryError: injected" in shown.err


def test_m7_a_candidate_that_fails_has_no_speed_and_the_comparison_goes_on(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_prompt_lookup(monkeypatch, RuntimeError("injected"))
    status = compare.main(["candidates=[prompt_lookup,no_cache]", "study=compare", *place.settings()])
    shown = capsys.readouterr().out
    found = place.runs("compare")
    assert status == 1
    assert (found["prompt_lookup"].status, found["prompt_lookup"].tags["validity"]) == ("FAILED", "failed")
    assert speeds(found["prompt_lookup"]) == []
    for strategy in ("baseline", "no_cache"):
        assert found[strategy].status == "FINISHED"
        assert found[strategy].metrics["throughput/decode_tok_s_aggregate"] > 0
    assert not [name for name in found["report"].metrics if "prompt_lookup" in name]
    assert "prompt_lookup: failed, no figures (RuntimeError: injected)" in " ".join(shown.split())


def test_m8_what_is_measured_was_not_read_before() -> None:
    """Two equal prompts, two repeats: each is read whole by both models, four times, and never in the warm-up."""
    prompt, clock = (0, 1, 2, 0, 0, 1), Clock()
    law = chain([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
    target, draft = SimulatedRunner(law, 3, 1, clock), SimulatedRunner(law, 3, 1, clock)
    drafter = DraftModelDrafter(draft, Sampler(SamplingParams()))
    decoder = build_decoder(target, num_slots=1, drafter=drafter, draft_length=2)
    blocks = [[Request(0, prompt, 8)], [Request(1, prompt, 8)]]
    traces = measure({"arm": decoder}, blocks, repeats=2, warmup=3, clock=clock)
    for runner in (target, draft):
        read = [text for verb, texts in runner.passes if verb == "prefill" for text in texts]
        assert read.count(prompt) == 4
        assert len(read) > 4  # there was a warm-up
        assert all(len(text) == len(prompt) for text in read)
    for one in traces:
        prefills = {
            phase: [e.counts for e in one.passes if e.phase == phase]
            for phase in ("prefill", "draft_prefill")
        }
        assert prefills == {"prefill": [(len(prompt),)], "draft_prefill": [(len(prompt),)]}
    assert len({request_metrics(timelines(one)[0]).ttft_ms for one in traces}) == 1


def test_m9_a_loop_is_flagged_and_not_averaged() -> None:
    """The looping text decodes 64 times as fast, the others twice."""
    loops = [7] * 20
    slow = {(i, 0): timeline([float(t) for t in range(20)], request_id=i) for i in range(7)}
    fast = {(i, 0): timeline([t / 2 for t in range(20)], request_id=i) for i in range(6)}
    fast[6, 0] = timeline([t / 64 for t in range(20)], request_id=6, token_ids=loops)
    found = statistics.speedups(fast, slow)
    assert statistics.excluded_units(fast, slow) == {(6, 0): "ends in a loop"}
    assert found.decode is not None
    assert found.decode.num_pairs == 6
    assert found.decode.value == pytest.approx(2.0, rel=1e-15)


def test_m9_texts_that_loop_are_listed_and_give_no_speed_up(place: Workplace) -> None:
    """A head of zeros: every logit is 0, and the text is the first token for ever."""
    folder = save_model(place.root / "looping")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    result = measure_point(prepare(compose_run(["strategy=prompt_lookup", *place.settings("looping")])))
    arms = result.point.arms
    for arm in (arms.strategy, arms.plain):
        assert [found.token_ids for found in result.timelines_of(arm).values()] == [(0,) * 20]
    assert "no speed-up from prompt 1, repeat 0: ends in a loop" in notes(result)
    assert not [name for name in result.metrics if name.startswith("speedup/")]
    assert result.verdict == statistics.TOO_FEW


def quota(monkeypatch: pytest.MonkeyPatch, filesystem: Path, limit: str) -> None:
    """Eight visible cores, and what `cpu.max` says."""
    for name, text in {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": f"{limit}\n"}.items():
        (filesystem / name).parent.mkdir(parents=True, exist_ok=True)
        (filesystem / name).write_text(text)
    monkeypatch.setattr(environment, "cgroup_quota", partial(environment.cgroup_quota, filesystem))
    monkeypatch.setattr(environment, "usable_cores", lambda: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def prepared(place: Workplace, threads: str) -> PreparedPoint:
    settings = [one for one in place.settings() if not one.startswith("threads=")]
    return prepare(compose_run(["strategy=baseline", f"threads={threads}", *settings]))


@pytest.mark.parametrize(("limit", "threads"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_m16_threads_are_recorded_and_within_the_quota(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, threads: int
) -> None:
    quota(monkeypatch, tmp_path, limit)
    assert environment.default_threads() == environment.quota_cores() == threads
    assert environment.collect()["cpu"]["quota_cores"] == threads
    assert prepared(place, "null").config.threads == threads
    with pytest.raises(ValueError, match=f"threads={threads + 1}: expected at most {threads}"):
        prepared(place, str(threads + 1))
