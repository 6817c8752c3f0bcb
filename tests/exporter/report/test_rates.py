"""The rates of the last minutes: of a GPU's busy time and of a run's steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter.report.rates import INTERVAL, KEPT_SECONDS, STEP_WINDOW, RecentRates
from rankscope_exporter.web import charts

RUN = ("r", "0")


def look(at: float, busy: float | None = None, steps: float | None = None) -> Any:
    """Return a poll with the counters of one GPU and of one run, whose rank 0 has ended."""
    ranks = [SimpleNamespace(rank=rank, ended=None, counters=SimpleNamespace(steps=steps)) for rank in (2, 1)]
    ended = SimpleNamespace(rank=0, ended="finished", counters=SimpleNamespace(steps=1e9))
    return SimpleNamespace(
        at=at,
        gpus={} if busy is None else {"GPU-a": SimpleNamespace(counters=SimpleNamespace(busy=busy))},
        readings={} if steps is None else {RUN: [*ranks, ended]},
    )


def test_a_gpus_rate_is_the_busy_time_of_each_interval() -> None:
    rates = RecentRates()
    for number, busy in enumerate([0.0, 4.0, 4.0, 9.5]):
        rates.record(look(INTERVAL * number, busy))
    assert rates.busy("GPU-a") == [(10.0, pytest.approx(0.8)), (5.0, 0.0), (0.0, 1.0)]
    assert rates.busy("GPU-b") == []


def test_a_runs_rate_is_that_of_its_first_living_rank_over_half_a_minute() -> None:
    rates = RecentRates()
    for number in range(STEP_WINDOW + 2):
        rates.record(look(INTERVAL * number, steps=number // 2))
    assert [rate for _, rate in rates.steps(RUN)] == [pytest.approx(0.1)] * 2


def test_a_counter_that_begins_again_has_no_rate_over_its_restart() -> None:
    rates = RecentRates()
    for at, busy in ((0.0, 100.0), (5.0, 104.0), (10.0, 1.0), (15.0, 2.0)):
        rates.record(look(at, busy))
    assert rates.busy("GPU-a") == [(0.0, pytest.approx(0.2))]


def test_only_the_last_minutes_of_what_is_still_there_are_kept() -> None:
    rates = RecentRates()
    for number in range(int(KEPT_SECONDS / INTERVAL) + 50):
        rates.record(look(INTERVAL * number, number, number))
    assert max(age for age, _ in rates.busy("GPU-a")) < KEPT_SECONDS
    rates.record(look(1e6))
    assert not rates.busy("GPU-a")
    assert not rates.steps(RUN)


def test_a_chart_is_interrupted_where_nothing_was_measured() -> None:
    rates = RecentRates()
    for number in (*range(10), *range(20, 30)):
        rates.record(look(INTERVAL * number, 2.0 * number))
    drawn = charts.line(rates.busy("GPU-a"), 1.0, "<busy>")
    assert drawn.count("<polyline") == 2
    assert 'aria-label="&lt;busy&gt;"' in drawn
    assert charts.line(rates.busy("GPU-a")[:3], 1.0, "busy") == ""
    assert charts.line(rates.busy("GPU-a"), 0.0, "busy") == ""
