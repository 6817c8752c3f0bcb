"""The charts of `rankscope top`: a run's step time and largest lag over the last minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from testing.judged_job import JudgedJob

from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.trends import CARRIED_SECONDS, KEPT_SECONDS, Trends


@pytest.fixture
def run(run_dir: Path) -> RunReport:
    return JudgedJob(run_dir).train(12)


def charts(run: RunReport, values: Sequence[tuple[float, float | None, float]], width: int = 66) -> list[list[str]]:
    """Return the lines of the charts of a run with these step times and lags at these times."""
    trends = Trends()
    for at, step, lag in values:
        ranks = [replace(run.ranks[0], lag_ratio=lag), *run.ranks[1:]]
        trends.add(NodeReport(at, [replace(run, step_seconds=step, ranks=ranks)]))
    return [chart.plain.split("\n") for chart in trends.charts(run, width, 2, has_color=True)]


def test_a_chart_has_its_name_its_time_and_the_ends_of_its_axis(run: RunReport) -> None:
    steps, lags = charts(run, [(float(at), 0.045 if at < 30 else 0.09, 0.3) for at in range(61)])
    assert steps[0] == "Run r: step time, last 60 s"
    assert steps[1] == f"90 ms {' ' * 30}{'█' * 30}"
    assert steps[2] == f" 0 ms {'█' * 60}"
    assert lags[0] == "Run r: largest lag as a part of the step, last 60 s"
    assert lags[1].startswith("30% █")


def test_noise_does_not_fill_the_chart_of_the_lag(run: RunReport) -> None:
    _, lags = charts(run, [(float(at), 0.045, 0.01) for at in range(61)])
    assert (lags[1], lags[2]) == ("10%", f" 0% {'▂' * 62}")


def test_a_time_without_a_value_is_empty_and_a_reading_is_not_carried_for_long(run: RunReport) -> None:
    values = [(0.0, 0.05, 0.0), (60.0, None, 0.0)]
    steps, _ = charts(run, values)
    assert steps[2] == f" 0 ms {'█' * int(CARRIED_SECONDS + 1)}"


def test_only_the_last_minutes_are_kept(run: RunReport) -> None:
    steps, _ = charts(run, [(at * 10.0, 0.045, 0.0) for at in range(200)])
    assert steps[0] == f"Run r: step time, last {KEPT_SECONDS / 60:.0f} min"


def test_a_run_that_is_not_known_has_no_chart(run: RunReport) -> None:
    trends = Trends()
    assert trends.charts(run, 66, 2, has_color=True) == ()
    trends.add(NodeReport(1.0, [run]))
    trends.add(NodeReport(2.0, []))
    assert trends.charts(run, 66, 2, has_color=True) == ()
