"""Fixtures shared by all tests, and how many processes run them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

MOST_WORKERS = 4

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there are as many processes as cores


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Several processes for the whole default tier; none for chosen files, nor for tiers that need all cores."""
    is_whole = not config.option.file_or_dir and config.option.markexpr.startswith("not slow")
    return (
        min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        if is_whole
        else 0
    )


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A test that sets their number doesn't set it for those behind it."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Toy models are too small to share: beside a busy process a second thread makes them 20 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring collects garbage before each block; of all that the tests have imported that takes 0.2 s each time."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
