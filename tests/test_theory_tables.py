"""The theory page's tables: published values that can be computed are, of the others it is said that they can't."""

from __future__ import annotations

import pytest

from experiments.article_values import Published, published_values
from experiments.theory_tables import theory_tables

NOT_GIVEN = {"write / read, another machine", "write / read, a third machine"}
# About 128k tokens are 16 GiB of cache; the model's weights are 15.
DIFFERENT = {"cache equals weights, weights of Llama 3.1 8B"}


def by_title(part: str) -> tuple[list[str], list[list[str]]]:
    [(_, header, rows)] = [table for table in theory_tables() if part in table[0]]
    return header, rows


@pytest.mark.parametrize("value", published_values(), ids=lambda value: value.quantity)
def test_published_values_are_computed(value: Published) -> None:
    expected = None if value.quantity in NOT_GIVEN else value.quantity not in DIFFERENT
    assert value.agrees is expected
    assert value.how


def test_equal_is_equal_as_rounded() -> None:
    def agrees(computed: float | None) -> bool | None:
        return Published("x", 3.8, 0.1, "ms", computed, "").agrees

    assert agrees(3.75)
    assert agrees(3.849)
    assert agrees(3.74) is False
    assert agrees(3.86) is False
    assert agrees(None) is None


def test_every_row_is_as_wide_as_its_header() -> None:
    tables = theory_tables()
    assert len({title for title, _, _ in tables}) == len(tables) == 10
    for title, header, rows in tables:
        assert rows, title
        assert {len(row) for row in rows} == {len(header)}, title


def test_published_and_computed_stand_side_by_side() -> None:
    _, rows = by_title("published and computed")
    found = {row[0]: row[1:4] for row in rows}
    assert found["prompt pass, arithmetic"] == ["0.0762 s", "0.07619 s", "yes"]
    assert found["one token, arithmetic"] == ["0.000038 s", "0.00003810 s", "yes"]
    assert found["write / read, a third machine"] == ["147 x", "", "can't be computed"]
    assert found["cache equals weights, weights of Llama 3.1 8B"] == [
        "131,072 tokens",
        "122,532 tokens",
        "no",
    ]


def test_what_is_not_published_of_a_device_is_left_out() -> None:
    header, rows = by_title("Devices")
    devices = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert devices["H100 SXM"]["ridge, FLOP/byte"] == "295"
    assert devices["H100 SXM"]["tok/s"] == "209"
    assert devices["Apple M4 Pro"]["16-bit TFLOP/s"] == "not published"
    assert devices["Apple M4 Pro"]["ridge, FLOP/byte"] == ""


def test_the_inverted_shape_is_nearly_all_prefill() -> None:
    header, rows = by_title("where the time goes")
    shapes = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert (shapes["inverted"]["prompt tokens"], shapes["inverted"]["new tokens"]) == ("100,000", "50")
    assert shapes["inverted"]["prefill's share"] == "96 %"
    assert shapes["chat"]["prefill's share"] == "0 %"
