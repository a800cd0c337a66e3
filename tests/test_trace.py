"""From events to the timeline of each request, and to rows that JSON can hold."""

from __future__ import annotations

import json

from toy_traces import forward, step, trace

from experiments.trace import RequestTimeline, Trace, as_rows, timelines


def ragged() -> Trace:
    return trace(
        step(1.0, 2.0, "prefill", {7: [1], 3: [2]}),
        step(2.0, 4.0, "verify", {7: [3, 4], 3: [5]}, drafted=[2, 0], accepted=[1, 0]),
        step(4.0, 5.0, "prefill", {9: [6]}),
        step(5.0, 6.0, "verify", {9: [7, 8, 9]}, drafted=[2], accepted=[2]),
        passes=[forward("prefill", 1.0, 1.5, [4])],
        proposals=[(2.0, 2.5)],
        repeat=2,
        block=5,
        start_s=1.0,
    )


def test_timelines_are_the_requests_in_order_of_admission() -> None:
    assert timelines(ragged()) == [
        RequestTimeline(7, 2, 0.0, 1.0, (2.0, 4.0), (1, 2), (1, 3, 4), block=5),
        RequestTimeline(3, 2, 0.0, 1.0, (2.0, 4.0), (1, 1), (2, 5), block=5),
        RequestTimeline(9, 2, 3.0, 4.0, (5.0, 6.0), (1, 3), (6, 7, 8, 9), block=5),
    ]
    assert [found.num_tokens for found in timelines(ragged())] == [3, 2, 4]


def test_an_empty_trace_has_no_timelines() -> None:
    assert timelines(trace()) == []


def test_rows_hold_every_event_and_survive_json() -> None:
    rows = [json.loads(json.dumps(row)) for row in as_rows([ragged()])]
    assert [row["event"] for row in rows] == ["block", *["step"] * 4, "pass", "proposal"]
    assert {(row["arm"], row["repeat"], row["block"]) for row in rows} == {("strategy", 2, 5)}
    assert rows[0] | {"start_s": 1.0, "end_s": 6.0} == rows[0]
    assert rows[2]["committed"] == [[3, 4], [5]]
    assert (rows[2]["phase"], rows[2]["request_ids"], rows[2]["accepted"]) == ("verify", [7, 3], [1, 0])
    assert (rows[5]["phase"], rows[5]["counts"], rows[5]["end_s"]) == ("prefill", [4], 1.5)
