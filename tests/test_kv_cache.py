"""Layouts and lengths, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.attention import AttentionRule
from specdec.kv_cache import CacheShape, KVCache, PassLayout

SHAPE = CacheShape(
    num_layers=2,
    num_slots=3,
    num_kv_heads=2,
    capacity=8,
    head_dim=4,
    dtype=torch.float64,
    device=torch.device("cpu"),
)


class RecordingStore:
    """Stores nothing, remembers what it was told."""

    def __init__(self) -> None:
        self.shape = SHAPE
        self.commits: list[list[int]] = []
        self.moves: list[tuple[int, int, int]] = []
        self.released: list[int] = []

    def write(self, layer: int, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        raise AssertionError

    def attend(self, layer: int, query: Tensor, layout: PassLayout, rule: AttentionRule) -> Tensor:
        raise AssertionError

    def commit(self, lengths: Sequence[int]) -> None:
        self.commits.append(list(lengths))

    def move(self, source: int, destination: int, length: int) -> None:
        self.moves.append((source, destination, length))

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def live_bytes(self, lengths: Sequence[int]) -> int:
        return 100 * sum(lengths)

    def allocated_bytes(self) -> int:
        return 100 * 3 * 8

    @property
    def bytes_per_token(self) -> float:
        return 100


def cache_with(lengths: Sequence[int]) -> KVCache:
    cache = KVCache(RecordingStore())
    cache.lengths = list(lengths)
    return cache


def visible(layout: PassLayout, window: int | None = None) -> list[list[list[int]]]:
    """Per row and token, the cache positions the query sees."""
    mask = layout.additive_mask(torch.float64, 1, window)
    assert mask.shape == (len(layout.starts), 1, layout.width, layout.extent)
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return [[(query == 0).nonzero().flatten().tolist() for query in row[0]] for row in mask]


def test_a_ragged_pass() -> None:
    layout = cache_with([2, 5, 0]).layout(0, [3, 1, 2], 3)
    assert layout.rows == slice(0, 3)
    assert layout.starts == (2, 5, 0)
    assert layout.extent == 6
    assert not layout.is_aligned
    assert not layout.is_whole_prompt
    assert not layout.sees_everything
    # padding is written to the spare slot, and gets a position that any table has
    assert layout.positions.tolist() == [[2, 3, 4], [5, 8, 8], [0, 1, 8]]
    assert layout.position_ids.tolist() == [[2, 3, 4], [5, 7, 7], [0, 1, 7]]
    seen = visible(layout)
    assert seen[0] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert seen[1][0] == [0, 1, 2, 3, 4, 5]
    assert seen[2][:2] == [[0], [0, 1]]
    # a query of padding sees something, so no softmax is taken over nothing
    assert all(seen[row][token] for row in range(3) for token in range(3))


def test_a_ragged_pass_with_a_window() -> None:
    seen = visible(cache_with([2, 5, 0]).layout(0, [3, 1, 2], 3), window=3)
    assert seen[0] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert seen[1][0] == [3, 4, 5]
    assert seen[2][:2] == [[0], [0, 1]]
    assert all(seen[row][token] for row in range(3) for token in range(3))  # padding too


def test_an_aligned_pass() -> None:
    layout = cache_with([4, 4, 4]).layout(0, [2, 2, 2], 2)
    assert layout.is_aligned
    assert not layout.is_whole_prompt
    assert layout.positions.tolist() == [[4, 5]] * 3
    assert torch.equal(layout.positions, layout.position_ids)


def test_equal_starts_with_padding_are_not_aligned() -> None:
    assert not cache_with([4, 4, 4]).layout(0, [2, 1, 2], 2).is_aligned
    assert not cache_with([4, 4, 4]).layout(0, [1, 1, 1], 2).is_aligned


def test_a_whole_prompt() -> None:
    layout = cache_with([4, 0, 0]).layout(1, [5], 5)
    assert layout.rows == slice(1, 2)
    assert layout.is_whole_prompt
    assert visible(layout) == [[list(range(n + 1)) for n in range(5)]]
    assert layout.row_index.tolist() == [[1]]


def test_one_token_at_the_end_of_every_row_needs_no_mask() -> None:
    assert cache_with([4, 4, 4]).layout(0, [1, 1, 1], 1).sees_everything
    assert not cache_with([4, 3, 4]).layout(0, [1, 1, 1], 1).sees_everything
    assert not cache_with([4, 4, 4]).layout(0, [1, 0, 1], 1).sees_everything


def test_a_pass_that_reads_nothing_at_all() -> None:
    layout = cache_with([0, 0, 0]).layout(0, [0, 0], 2)
    assert layout.extent == 1
    assert layout.positions.tolist() == [[8, 8], [8, 8]]
    assert visible(layout) == [[[0], [0]], [[0], [0]]]


def test_a_full_row_beside_a_growing_one() -> None:
    layout = cache_with([8, 6, 0]).layout(0, [0, 2], 2)
    assert layout.extent == 8
    assert layout.positions.tolist() == [[8, 8], [6, 7]]
    assert layout.position_ids.max() == 7


def test_a_mask_repeats_for_the_query_heads_of_a_group() -> None:
    """Heads of a group are folded into the token axis, head by head."""
    layout = cache_with([2, 5, 0]).layout(0, [3, 1, 2], 3)
    once = layout.additive_mask(torch.bfloat16, 1)
    twice = layout.additive_mask(torch.bfloat16, 2)
    assert once.dtype == torch.bfloat16
    assert torch.equal(twice, torch.cat([once, once], 2))


@pytest.mark.parametrize(
    ("first_slot", "counts", "width", "message"),
    [
        (0, [3, 0, 0], 3, "slot 0 holds 6 tokens and gets 3 .* capacity is 8"),
        (1, [0, 9], 9, "slot 2 holds 0 tokens and gets 9"),
        (0, [2], 1, "slot 0 holds 6 tokens and gets 2 in a pass of 1"),
        (0, [-1], 1, "gets -1"),
        (2, [1, 1], 1, "2 rows from slot 2 on, but there are 3 slots"),
    ],
)
def test_what_does_not_fit_is_refused(first_slot: int, counts: list[int], width: int, message: str) -> None:
    cache = cache_with([6, 2, 0])
    with pytest.raises(ValueError, match=message):
        cache.layout(first_slot, counts, width)
    assert cache.lengths == [6, 2, 0]


def test_lengths_grow_and_roll_back() -> None:
    cache = cache_with([2, 5, 1])
    layout = cache.layout(0, [3, 1], 3)
    assert cache.lengths == [2, 5, 1]  # nothing happened yet
    cache.advance(layout)
    assert cache.lengths == [5, 6, 1]
    cache.roll_back([3, 5])
    assert cache.lengths == [3, 5, 1]
    cache.advance(cache.layout(2, [4], 4))
    assert cache.lengths == [3, 5, 5]


@pytest.mark.parametrize("lengths", [[3, 5, 1], [2, -1, 1], [2, 5, 2]])
def test_rolling_back_never_adds(lengths: list[int]) -> None:
    cache = cache_with([2, 5, 1])
    with pytest.raises(ValueError, match="can't be rolled back"):
        cache.roll_back(lengths)
    assert cache.lengths == [2, 5, 1]


def test_commit_tells_the_store_what_is_final() -> None:
    cache = cache_with([4, 5, 1])
    cache.roll_back([2, 5, 1])
    cache.commit()
    assert isinstance(cache.store, RecordingStore)
    assert cache.store.commits == [[2, 5, 1]]


def test_one_slot_is_final_and_the_others_are_not() -> None:
    """As where a prompt was read while the tokens of another row are still to be judged."""
    cache = cache_with([4, 5, 1])
    cache.commit_slot(1)
    assert isinstance(cache.store, RecordingStore)
    assert cache.store.commits == [[0, 5, 0]]
    assert cache.lengths == [4, 5, 1]


def test_move_and_release() -> None:
    cache = cache_with([2, 5, 7])
    cache.release(0)
    assert cache.lengths == [0, 5, 7]
    cache.move(2, 0)
    assert cache.lengths == [7, 5, 0]
    assert isinstance(cache.store, RecordingStore)
    assert cache.store.moves == [(2, 0, 7)]


def test_live_bytes_follow_the_lengths() -> None:
    cache = cache_with([2, 5, 0])
    assert cache.live_bytes == 700
    cache.roll_back([1, 1])
    assert cache.live_bytes == 200


# --- a view: the same buffer, lengths of its own


def test_a_view_goes_on_where_its_owner_is_and_forgets_what_it_wrote() -> None:
    cache = cache_with([5, 3, 0])
    view = cache.view()
    assert (view.store, view.lengths) == (cache.store, [5, 3, 0])
    view.advance(view.layout(0, [2, 1], 2))
    assert (view.lengths, cache.lengths) == ([7, 4, 0], [5, 3, 0])
    view.roll_back([6, 4])
    assert view.lengths == [6, 4, 0]
    cache.roll_back([5, 2])  # what is ahead stays ahead until it is rolled back too
    view.roll_back([5, 2])
    assert view.lengths == cache.lengths == [5, 2, 0]


def test_a_view_can_not_forget_what_its_owner_holds() -> None:
    view = cache_with([5, 3, 0]).view()
    view.roll_back([1, 1])
    assert view.lengths == [5, 3, 0]


def test_a_view_never_seals_moves_or_releases_what_is_stored() -> None:
    cache = cache_with([5, 3, 2])
    view = cache.view()
    view.advance(view.layout(0, [1, 1, 1], 1))
    view.commit()
    view.commit_slot(1)
    view.release(0)
    view.move(2, 1)
    store = cache.store
    assert isinstance(store, RecordingStore)
    assert store.commits == store.moves == store.released == []
    assert view.lengths == cache.lengths == [5, 3, 2]


def test_a_view_of_some_layers_says_so() -> None:
    assert (cache_with([0] * 3).view().num_layers, cache_with([0] * 3).view(1).num_layers) == (2, 1)
