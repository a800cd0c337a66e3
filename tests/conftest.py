"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


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
