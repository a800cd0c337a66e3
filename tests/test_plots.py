"""Figures: what is drawn is the data, texts are legible and apart, and nothing to draw gives no figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from toy_traces import step, trace

from experiments.plots.acceptance import acceptance
from experiments.plots.curves import MOST_MARKERS, Mark, Panel, curves
from experiments.plots.curves import Line as Curve
from experiments.plots.intervals import IntervalRow, intervals, ticks
from experiments.plots.roofline import roofline
from experiments.plots.shares import ShareBar, shares
from experiments.plots.step_gaps import running_median, step_gaps
from experiments.plots.style import lighter, png, wrap
from experiments.plots.timeline import COLOURS, request_timeline
from experiments.roofline import Ceilings, RooflinePoint
from experiments.trace import PassEvent, Trace

LONG_NAME = "plain / dense / speculative / draft_model(weights=bnb_nf4)/fixed"
CEILINGS = Ceilings(read_gb_s=32.0, gemm_gflop_s=1024.0)


def forward(phase: str, start_s: float, end_s: float) -> PassEvent:
    return PassEvent(phase, start_s, end_s, (1,), 1, (8,), 8)


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata(), dtype=float).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def axes_of(figure: Figure | None) -> Axes:
    assert figure is not None
    (axes,) = figure.axes
    return axes


def texts_of(figure: Figure) -> list[Text]:
    """All texts of a rendered figure that are drawn and have something in them."""
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()]
    hidden = {id(text) for axes in figure.axes for text in _out_of_view(axes)}
    return [text for text in texts if text.get_visible() and id(text) not in hidden]


def _out_of_view(axes: Axes) -> list[Text]:
    """Labels of ticks that locators give beyond the axis; matplotlib does not draw them."""
    hidden = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        hidden += [tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
    return hidden


def overlapping(texts: Sequence[Text]) -> list[tuple[str, str]]:
    """Pairs of level texts whose boxes overlap by more than a rounded pixel."""
    level = [text for text in texts if text.get_rotation() == 0]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in level]
    return [(a, b) for (a, box), (b, other) in combinations(boxes, 2) if box.overlaps(other)]


def assert_legible(figure: Figure | None) -> None:
    """No texts over another or beyond the figure, none small; and it renders."""
    assert figure is not None
    assert png(figure).startswith(b"\x89PNG\r\n\x1a\n")
    texts = texts_of(figure)
    assert overlapping(texts) == []
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.width + 1, text
        assert box.y1 <= figure.bbox.height + 1, text
        assert float(text.get_fontsize()) >= 11


def legend_texts(figure: Figure) -> list[str]:
    return [
        text.get_text() for item in figure.legends for text in item.get_texts() if isinstance(item, Legend)
    ]


# Curves


def test_theory_is_dashed_and_has_no_markers_and_named_points_are_named() -> None:
    measured = Curve("measured", [(1, 10), (2, 20), (4, 25)], names=["one", "two", "four"])
    theory = Curve("theory", [(1, 5), (4, 6)], is_theory=True)
    panel = Panel([measured, theory], "rows", "time, ms", log_x=False, log_y=False, marks=[Mark("", (2, 20))])
    figure = curves([panel], "Rows cost time")
    axes = axes_of(figure)
    solid, dashed = axes.lines[:2]
    assert (xs(solid), ys(solid)) == ([1, 2, 4], [10, 20, 25])
    assert (solid.get_linestyle(), solid.get_marker()) == ("-", "o")
    assert dashed.get_linestyle() == "--"
    assert dashed.get_marker() in ("", "None", None)
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["one", "two", "four"]
    assert_legible(figure)


def test_names_beside_a_falling_curve_are_to_its_right() -> None:
    def side(ys: Sequence[float]) -> str:
        line = Curve("measured", list(enumerate(ys, 1)), names=["a"] * len(ys))
        return axes_of(curves([Panel([line], "x", "y")], "t")).texts[0].get_horizontalalignment()

    assert (side([1, 2, 3]), side([3, 2, 1])) == ("right", "left")


@pytest.mark.parametrize(("count", "marker"), [(MOST_MARKERS, "o"), (MOST_MARKERS + 1, "None")])
def test_many_points_have_no_markers(count: int, marker: str) -> None:
    line = Curve("measured", [(x, 1.0) for x in range(1, count + 1)])
    (drawn,) = axes_of(curves([Panel([line], "x", "y")], "t")).lines
    assert (drawn.get_marker() or "None") == marker


def test_ticks_are_measured_points_with_room_between_them_and_where_theory_ends() -> None:
    measured = Curve("measured", [(2.0**power, 1.0) for power in range(5, 12)])
    theory = Curve("fitted", [(32, 1.0), (100_000, 900.0)], is_theory=True)
    figure = curves([Panel([measured, theory], "tokens", "ms")] * 2, "Far beyond")
    assert figure is not None
    assert list(figure.axes[0].get_xticks()) == [32, 256, 2048, 100_000]
    assert_legible(figure)
    prompts = Curve("measured", [(2.0**power, 1.0) for power in range(4, 14)])
    wide = curves([Panel([prompts], "tokens", "ms")] * 2, "Long labels")
    assert wide is not None
    assert list(wide.axes[0].get_xticks()) == [32, 128, 512, 2048, 8192]
    assert_legible(wide)
    near = curves([Panel([measured], "tokens", "ms")], "All of them")
    assert list(axes_of(near).get_xticks()) == [32, 64, 128, 256, 512, 1024, 2048]


def test_a_y_axis_over_many_decades_has_powers_of_ten_only() -> None:
    def labelled(most: float) -> set[float]:
        figure = curves([Panel([Curve("measured", [(1, 1), (2, most)])], "x", "y")], "t")
        low, high = axes_of(figure).get_ylim()
        return {tick for tick in axes_of(figure).get_yticks() if low <= tick <= high}

    assert labelled(1e5) == {1, 10, 100, 1e3, 1e4, 1e5}
    assert {2, 5, 20} <= labelled(100)


def test_curves_without_a_point_are_no_figure() -> None:
    assert curves([Panel([Curve("measured", [])], "x", "y")], "t") is None


# Shares


def test_bars_are_divided_by_share_and_what_is_predicted_is_dashed() -> None:
    bars = [
        ShareBar("chat\npredicted", {"reading": 1, "writing": 3}, "4 s", is_theory=True),
        ShareBar("chat\nmeasured", {"reading": 0.25, "writing": 4.75}, "5 s"),
    ]
    figure = shares(bars, "Chat writes", "share, %")
    axes = axes_of(figure)
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [  # type: ignore[attr-defined]
        (0, 25),
        (25, 75),
        (0, 5),
        (5, 95),
    ]
    assert [bar.get_linestyle() for bar in axes.patches] == ["--", "--", "-", "-"]
    # A share without room is not written; totals stand behind the bars.
    assert [text.get_text() for text in axes.texts] == ["25 %", "75 %", "4 s", "95 %", "5 s"]
    assert_legible(figure)


def test_no_bars_are_no_figure() -> None:
    assert shares([], "t", "share, %") is None


# Timeline


def speculative(arm: str = "specdec", request_id: int = 7, num_steps: int = 2) -> Trace:
    """Admitted at 10 s; prefill of 125 ms, then steps of 250 ms: 125 of drafting, 62.5 of verifying, 62.5 of rest."""
    steps = [step(10, 10.125, "prefill", {request_id: [1], 99: [1]})]
    passes, proposals = [forward("prefill", 10, 10.125)], []
    for index in range(num_steps):
        start_s = 10.125 + 0.25 * index
        committed: dict[int, Sequence[int]] = {request_id: [1, 2, 3], 99: [1]}
        steps.append(step(start_s, start_s + 0.25, "verify", committed, [4, 4], [2, 0]))
        proposals.append((start_s, start_s + 0.125))
        passes.append(forward("verify", start_s + 0.125, start_s + 0.1875))
    passes.append(forward("draft_prefill", 10.125, 10.15625))
    return trace(*steps, passes=passes, proposals=proposals, arm=arm, start_s=9.0)


def plain(arm: str = "reference", request_id: int = 7, num_steps: int = 3) -> Trace:
    steps = [step(0, 0.125, "prefill", {request_id: [1]})]
    for index in range(num_steps):
        start_s = 0.125 + 0.0625 * index
        steps.append(step(start_s, start_s + 0.0625, "decode", {request_id: [1]}))
    return trace(*steps, arm=arm)


def blocks(axes: Axes, kind: str, row: int) -> list[tuple[float, float]]:
    """(start, end) in ms of the blocks in either shade of a kind."""
    shades = {to_hex(COLOURS[kind]), to_hex(lighter(COLOURS[kind]))}
    found = []
    for bars in axes.collections:
        if isinstance(bars, PolyCollection) and to_hex(tuple(np.asarray(bars.get_facecolor())[0])) in shades:
            for path in bars.get_paths():
                (x0, y0), (x1, y1) = path.get_extents().get_points()
                if math.isclose(0.5 * (y0 + y1), row):
                    found.append((x0, x1))
    return sorted(found)


def test_a_lane_per_arm_in_order_with_times_since_admission() -> None:
    figure = request_timeline([speculative(), plain()], 7, "one request")
    axes = axes_of(figure)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["specdec", "reference"]
    assert axes.get_xlabel().endswith(", ms")
    assert blocks(axes, "prefill", 0) == [(0, 125)]
    assert blocks(axes, "draft prefill", 0) == [(125, 156.25)]
    assert blocks(axes, "draft", 0) == [(125, 250), (375, 500)]
    assert blocks(axes, "verify", 0) == [(250, 312.5), (500, 562.5)]
    assert blocks(axes, "other", 0) == [(125, 375), (375, 625)]
    assert blocks(axes, "decode", 1) == [(125, 187.5), (187.5, 250), (250, 312.5)]
    firsts = [xs(line)[0] for line in axes.lines if line.get_marker() == "^"]
    assert firsts == [125, 125]
    texts = [text.get_text() for text in axes.texts]
    assert texts == [
        "7 tokens in 625 ms\nfirst after 125 ms",
        "3",
        "3",
        "4 tokens in 312 ms\nfirst after 125 ms",
    ]
    assert figure is not None
    assert legend_texts(figure)[:6] == ["prefill", "decode", "draft prefill", "draft", "verify", "other"]
    assert_legible(figure)


def test_only_steps_of_the_request_are_drawn() -> None:
    shared = speculative()
    others = step(10.625, 10.75, "prefill", {50: [1]})
    last = step(10.75, 11.0, "verify", {7: [1], 50: [2]}, [1, 1], [0, 0])
    shared.steps += [others, last]
    axes = axes_of(request_timeline([shared], 7, "a batch"))
    assert blocks(axes, "prefill", 0) == [(0, 125)]
    assert blocks(axes, "other", 0)[-1] == (750, 1000)
    assert axes.texts[0].get_text().startswith("8 tokens in 1,000 ms")
    late = axes_of(request_timeline([shared], 50, "admitted later"))
    assert blocks(late, "prefill", 0) == [(0, 125)]
    assert blocks(late, "other", 0) == [(125, 375)]


def test_one_token_is_a_prefill() -> None:
    figure = request_timeline([plain(num_steps=0)], 7, "one token")
    assert axes_of(figure).texts[0].get_text() == "1 token in 125 ms\nfirst after 125 ms"
    assert figure is not None
    assert legend_texts(figure) == ["prefill", "first token"]
    assert_legible(figure)


def test_no_lane_without_the_request() -> None:
    assert request_timeline([speculative(), plain()], 8, "unknown") is None
    assert request_timeline([], 7, "no arms") is None
    axes = axes_of(request_timeline([plain(request_id=1), speculative()], 7, "one of two"))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["specdec"]


def test_many_steps_and_long_names_stay_legible() -> None:
    arms = [speculative(f"{LONG_NAME}{index}", num_steps=100) for index in range(5)]
    figure = request_timeline([*arms, plain(num_steps=256)], 7, LONG_NAME * 3)
    assert_legible(figure)
    assert not [text for text in axes_of(figure).texts if text.get_text() == "3"]
    assert blocks(axes_of(figure), "decode", 5) == [(125, 125 + 256 * 62.5)]


# Step gaps


def test_step_gaps_has_dots_and_a_median_per_arm() -> None:
    series = {"specdec": [(1, 90.0), (4, 100.0)], "reference": [(1, 20.0), (2, 24.0), (3, 22.0)]}
    figure = step_gaps(series, "gaps")
    axes = axes_of(figure)
    dots, lines = axes.lines[::2], axes.lines[1::2]
    assert [list(zip(xs(line), ys(line), strict=True)) for line in dots] == list(series.values())
    assert [ys(line) for line in lines] == [[90, 100], [22, 22, 22]]
    assert axes.get_ylim() == (0, pytest.approx(105))
    assert ", ms" in axes.get_ylabel()
    assert "tokens" in axes.get_xlabel()
    assert figure is not None
    assert legend_texts(figure) == list(series)
    assert_legible(figure)


def test_running_median_takes_points_near_in_output() -> None:
    points = np.array([(position, float(position)) for position in range(201)])
    medians = running_median(points)
    assert medians[0].tolist() == [0, 2.5]  # 0 to 5
    assert medians[100].tolist() == [100, 100]


def test_points_above_the_axis_are_counted() -> None:
    points = [(position, 20.0) for position in range(1, 400)] + [(50, 900.0), (60, 1000.0)]
    figure = step_gaps({"reference": points}, "two stalls")
    axes = axes_of(figure)
    assert axes.get_ylim()[1] == pytest.approx(26)
    assert [text.get_text() for text in axes.texts] == ["▲ 2 points above the axis"]
    (edge,) = [line for line in axes.lines if line.get_marker() == "^"]
    assert xs(edge) == [50, 60]
    assert_legible(figure)


def test_one_step_is_visible_and_no_step_is_no_figure() -> None:
    figure = step_gaps({"specdec": [(1, 3.0)], "reference": []}, "one")
    assert axes_of(figure).lines[-1].get_marker() == "o"
    assert_legible(figure)
    assert step_gaps({"reference": []}, "none") is None
    assert step_gaps({}, "none") is None


# Acceptance


def test_acceptance_by_position() -> None:
    figure = acceptance([0.75, 0.5, 0.0], [0.75, 0.625, math.nan], [120, 100, 1], "accepted")
    axes = axes_of(figure)
    assert [bar.get_height() for bar in axes.patches] == [75, 50, 0]  # type: ignore[attr-defined]
    (line,) = axes.lines
    np.testing.assert_array_equal(ys(line), [75, 62.5, math.nan])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1\nn=120", "2\nn=100", "3\nn=1"]
    assert axes.get_ylim() == (0, 100)
    assert axes.get_ylabel().endswith("%")
    assert [text.get_text() for text in axes.texts] == ["75", "50", "0"]
    assert_legible(figure)


@pytest.mark.parametrize("positions", [1, 32])
def test_acceptance_of_one_position_and_of_many(positions: int) -> None:
    figure = acceptance([0.5] * positions, [0.5] * positions, [12345] * positions, LONG_NAME * 2)
    assert len(axes_of(figure).patches) == positions
    assert_legible(figure)


def test_no_draft_positions_no_figure() -> None:
    assert acceptance([], [], [], "none") is None


# Roofline


def point(label: str, operations_per_byte: float, gflop_s: float) -> RooflinePoint:
    return RooflinePoint(label, 10, operations_per_byte, gflop_s, gflop_s / operations_per_byte)


def markers(axes: Axes) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_marker() not in ("None", None)]
    return [(xs(line)[0], ys(line)[0]) for line in lines]


def test_roofline_shows_roof_ridge_and_a_marker_per_point() -> None:
    points = {
        "specdec": [point("verify of 5", 5, 100)],
        "reference": [point("decode", 1, 30), point("prefill", 90, 600)],
    }
    figure = roofline({**points, "silent": []}, CEILINGS, "roofline")
    axes = axes_of(figure)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    roof = axes.lines[0]
    assert xs(roof)[1] == 32
    assert ys(roof) == [xs(roof)[0] * 32, 1024, 1024]
    assert markers(axes) == [(32, 1024), (5, 100), (1, 30), (90, 600)]
    texts = {text.get_text() for text in axes.texts}
    assert {"memory: 32 GB/s", "matrix products: 1,024 GFLOP/s", "ridge: 32 operations per byte"} < texts
    assert {"verify of 5", "decode", "prefill"} < texts
    assert "per byte" in axes.get_xlabel()
    assert axes.get_ylabel().endswith("GFLOP/s")
    assert figure is not None
    assert legend_texts(figure) == ["specdec", "reference"]
    assert_legible(figure)


def test_labels_of_a_crowded_roofline_are_apart() -> None:
    crowd = [point(f"verify of {k}", 3.5 + 0.3 * k, 95 + 3 * (k % 3)) for k in range(1, 6)]
    others = [point("decode", 4, 96), point("draft", 4.6, 99), point("verify of 9", 5.0, 97)]
    figure = roofline({"specdec": crowd, LONG_NAME: others}, CEILINGS, "crowded")
    labels = [
        text for text in axes_of(figure).texts if text.get_text().startswith(("verify", "decode", "draft"))
    ]
    assert len(labels) == 8
    assert_legible(figure)
    assert figure is not None
    slanted = next(text for text in axes_of(figure).texts if text.get_text().startswith("memory"))
    assert 0 < float(slanted.get_rotation()) < 90


def test_arms_at_one_place_are_rings_with_one_label() -> None:
    same = {"specdec": [point("prefill", 90, 600)], "reference": [point("prefill", 90, 600)]}
    axes = axes_of(roofline(same, CEILINGS, "same place"))
    assert markers(axes)[1:] == [(90, 600), (90, 600)]
    below, above = axes.lines[2:4]
    assert float(below.get_markersize()) > 1.3 * float(above.get_markersize())
    assert below.get_zorder() < above.get_zorder()
    assert below.get_marker() != above.get_marker()
    assert [text.get_text() for text in axes.texts].count("prefill") == 1


def test_no_points_no_roofline() -> None:
    assert roofline({}, CEILINGS, "none") is None
    assert roofline({"reference": []}, CEILINGS, "none") is None


# Intervals

ROWS = [
    IntervalRow("specdec", 0.68, 0.59, 0.78, "slower"),
    IntervalRow(LONG_NAME, 1.86, 1.48, 2.40, "faster"),
    IntervalRow("one pair", 1.0, None, None, "no difference shown"),
]


def test_intervals_are_drawn_from_end_to_end() -> None:
    figure = intervals(ROWS, "speed-ups", "speed-up of decode, ratio")
    axes = axes_of(figure)
    assert axes.get_xscale() == "log"
    one, *lines = axes.lines
    assert xs(one) == [1, 1]
    assert [xs(line) for line in lines[::2]] == [[0.59, 0.78], [1.48, 2.40], [1.0, 1.0]]
    assert [xs(line) for line in lines[1::2]] == [[0.68], [1.86], [1.0]]
    assert len({line.get_color() for line in lines[1::2]}) == 3
    assert [text.get_text() for text in axes.texts] == [
        "0.68x [0.59, 0.78] slower",
        "1.86x [1.48, 2.40] faster",
        "1.00x no difference shown",
    ]
    assert axes.get_xlabel() == "speed-up of decode, ratio"
    assert axes.get_yticklabels()[0].get_text() == "specdec"
    assert axes.get_ylim() == (2.5, -0.5)
    assert_legible(figure)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.97, 1.03, [0.98, 1.0, 1.02]),
        (0.45, 2.2, [0.5, 1, 2]),
        (0.55, 2.6, [0.7, 1, 1.5, 2]),
        (0.25, 36, [0.5, 1, 2, 5, 10, 20]),
        (0.9, 1.4, [0.9, 1, 1.1, 1.2, 1.3, 1.4]),
        (0.001, 1000, [0.001, 0.01, 0.1, 1, 10, 100, 1000]),
    ],
)
def test_ticks_are_round_ratios(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


@pytest.mark.parametrize("values", [(0.3, 30.0), (0.97, 1.03), (1.0, 1.0), (1.1, 1.4), (0.02, 50.0)])
def test_any_range_of_ratios_has_three_labels(values: tuple[float, float]) -> None:
    rows = [IntervalRow("arm", value, 0.99 * value, 1.01 * value, "") for value in values]
    figure = intervals(rows, "range", "ratio")
    labels = axes_of(figure).get_xticklabels()
    low, high = axes_of(figure).get_xlim()
    assert sum(low <= float(label.get_text().rstrip("x")) <= high for label in labels) >= 3
    assert_legible(figure)


def test_narrow_intervals_have_a_digit_more() -> None:
    assert IntervalRow("a", 1.0, 0.998, 1.001, "no difference shown").text.startswith("1.000x [0.998, 1.001]")


def test_no_rows_no_figure() -> None:
    assert intervals([], "none", "ratio") is None


# Style


def test_equal_data_gives_equal_bytes() -> None:
    images = [png(figure) for _ in range(2) if (figure := intervals(ROWS, "speed-ups", "ratio")) is not None]
    assert images[0] == images[1]


def test_text_is_wrapped_behind_punctuation_and_dollars_are_no_mathematics() -> None:
    assert wrap("prompt_lookup(min_ngram=1,max_ngram=3)", 28) == "prompt_lookup(min_ngram=1,\nmax_ngram=3)"
    figure = intervals([IntervalRow("$5 and $x_", 1.0, None, None, "")], "a $1 and $2 title", "ratio")
    assert_legible(figure)
