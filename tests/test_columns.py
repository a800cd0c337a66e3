"""Which columns a query sees, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.attention import AttentionRule
from specdec.columns import Columns
from specdec.kv_cache import PassLayout

NEVER = 99
# Two rows that read two tokens each, at positions 3 and 4, and at 1 (then padding).
LAYOUT = PassLayout(0, (3, 1), (2, 1), 2, 8, torch.device("cpu"))


def columns(since: list[int], until: list[int], tokens: slice = slice(None)) -> Columns:
    positions = torch.tensor([[4, 0, 1, 2, 3], [4, 0, 1, 2, 3]])
    return LAYOUT.columns(positions, torch.tensor([since]), torch.tensor([until] * 2), tokens)


def visible(mask: Tensor) -> list[list[list[int]]]:
    return [[(query == 0).nonzero().flatten().tolist() for query in row[0]] for row in mask]


def test_a_query_sees_the_positions_up_to_its_own_wherever_they_are() -> None:
    mask = columns([0] * 5, [NEVER] * 5).additive_mask(torch.float64, 1)
    assert visible(mask) == [[[1, 2, 3, 4], [0, 1, 2, 3, 4]], [[1, 2], [0, 1, 2, 3, 4]]]  # padding sees all
    assert visible(columns([0] * 5, [NEVER] * 5).additive_mask(torch.float64, 1, 2)) == [
        [[3, 4], [0, 4]],
        [[1, 2], [0, 1, 2, 3, 4]],
    ]


def test_two_forms_of_a_token_are_seen_by_queries_on_either_side() -> None:
    """Column 1 from position 4 on, column 2 before it."""
    found = columns([0, 4, 0, 0, 0], [NEVER, NEVER, 4, NEVER, NEVER]).additive_mask(torch.float64, 1)
    assert visible(found) == [[[2, 3, 4], [0, 1, 3, 4]], [[2], [0, 1, 2, 3, 4]]]


def test_a_part_of_a_pass_has_a_mask_of_its_own_made_once() -> None:
    part = columns([0] * 5, [NEVER] * 5, slice(1, 2))
    mask = part.additive_mask(torch.float32, 3)
    assert mask.shape == (2, 1, 3, 5)
    assert visible(mask)[0] == [[0, 1, 2, 3, 4]] * 3
    assert part.additive_mask(torch.float32, 3) is mask


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 2])
def test_attention_does_not_depend_on_the_order_of_columns(window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, n, 4, generator=generator, dtype=torch.float64)
        for heads, n in ((4, 2), (2, 5), (2, 5))
    )
    rule = AttentionRule(0.5, window, softcap)
    order = [4, 0, 1, 2, 3]
    found = columns([0] * 5, [NEVER] * 5).attend(query, keys[:, :, order], values[:, :, order], rule)
    expected = LAYOUT.attend(query, keys, values, rule)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(found[1, :1], expected[1, :1], rtol=0, atol=1e-14)
    assert bool(found.isfinite().all())
