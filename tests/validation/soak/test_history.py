"""The evaluation of Prometheus' samples."""

from __future__ import annotations

from validation.soak.history import decreases, spans


def test_a_counter_that_falls_is_found_where_it_falls():
    found = list(decreases([(0, 1.0), (15, 2.0), (30, 0.5), (45, 0.5)]))
    assert found == [{"before": 15, "after": 30, "was": 2.0, "is": 0.5}]


def test_times_without_a_gap_are_one_span():
    assert spans([0, 15, 30, 90, 105], gap=22) == [(0, 30), (90, 105)]
