"""`exactness=bitwise` on the real model in bf16: the twin's tokens, and the twin's logits bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from toy_engine import Keeping, collect

from experiments import strategy
from experiments.config import compose_run
from experiments.environment import quota_cores
from experiments.models import LoadedModels
from experiments.point import PreparedPoint, prepare
from experiments.strategy import build_parts
from specdec.types import StepOutput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PRESETS = ("prompt_lookup", "self_int4")
NEW_TOKENS = 12
CHUNK = 24
two_threads = pytest.mark.skipif(quota_cores() < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def loaded() -> LoadedModels:
    """Target and 4-bit draft, once for all points."""
    return LoadedModels()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def point(
    loaded: LoadedModels, preset: str, exactness: str, threads: int, batch_size: int, chunk: int | None
) -> PreparedPoint:
    """Over short prompts, one more than there are slots: the last one takes a slot that was used."""
    overrides = [
        f"strategy={preset}",
        f"exactness={exactness}",
        f"threads={threads}",
        f"batch_size={batch_size}",
        f"prefill_chunk={'null' if chunk is None else chunk}",
        "workload.limit=12",
        f"workload.max_new_tokens={NEW_TOKENS}",
        "draft_length.max=4",
        "dtype=bf16",
        "device=cpu",
    ]
    found = prepare(compose_run(overrides), loaded)
    short = [request for request in found.requests if len(request.prompt_ids) < 200]
    return replace(found, requests=short[: batch_size + 1])


def decode(point: PreparedPoint, arm: str) -> tuple[list[StepOutput], Keeping]:
    """Steps of an arm, and the target's logits behind each text that it read."""
    chosen = getattr(point.arms, arm)
    assert point.config.threads is not None
    torch.set_num_threads(point.config.threads)
    sampler = Keeping()  # the decoder's alone: the drafter has its own
    parts = replace(build_parts(chosen, point.pool, point.settings), sampler=sampler)
    return list(chosen.decoding.build(parts).generate(point.requests)), sampler


def check_bits_of(loaded: LoadedModels, threads: int, batch_size: int, chunk: int | None) -> None:
    points = [point(loaded, preset, "bitwise", threads, batch_size, chunk) for preset in PRESETS]
    assert points[0].arms.twin.same_parts(points[1].arms.twin)
    twin_steps, twin = decode(points[0], "twin")
    texts = collect(twin_steps)
    assert len(twin.seen) == sum(map(len, texts.values()))  # a position for each token that was committed
    rejected = 0
    for one in points:
        steps, speculative = decode(one, "strategy")
        assert collect(steps) == texts
        for position, logits in twin.seen.items():
            assert torch.equal(speculative.seen[position], logits), (one.config.strategy, position)
        accepted, drafted = (
            sum(map(sum, counts)) for counts in zip(*((s.accepted, s.drafted) for s in steps), strict=True)
        )
        assert accepted > 0
        rejected += drafted - accepted
    assert rejected > 0


@pytest.mark.parametrize(
    ("threads", "batch_size"),
    [
        pytest.param(1, 1, marks=pytest.mark.sample),
        (1, 4),
        pytest.param(2, 1, marks=two_threads),
        pytest.param(2, 4, marks=two_threads),
    ],
)
@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_logits_are_the_twins_bit_for_bit(
    loaded: LoadedModels, monkeypatch: pytest.MonkeyPatch, threads: int, batch_size: int, chunk: int | None
) -> None:
    monkeypatch.setattr(
        strategy, "check_bits", lambda *_: None
    )  # it takes as long as all the rest; see below
    check_bits_of(loaded, threads, batch_size, chunk)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=two_threads)])
def test_a_run_promises_it(loaded: LoadedModels, threads: int) -> None:
    assert decode(point(loaded, "prompt_lookup", "bitwise", threads, 1, None), "twin")[0]


@pytest.mark.sample
@pytest.mark.parametrize("preset", PRESETS)
def test_without_the_mode_they_are_not(loaded: LoadedModels, preset: str) -> None:
    """Else the tests above would show nothing."""
    found = point(loaded, preset, "tokens", 1, 1, None)
    (_, speculative), (_, twin) = decode(found, "strategy"), decode(found, "twin")
    common = set(speculative.seen) & set(twin.seen)
    assert any(not torch.equal(speculative.seen[position], twin.seen[position]) for position in common)
