"""The time that `rankscope top --once` waits before it prints, and its message if a package is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from testing.judged_job import JudgedJob

from rankscope.cli import launch
from rankscope.cli.commands import REQUIRED, missing
from rankscope.record.phases import NAMES
from rankscope.record.writer import default_run_dirs
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.findings import PendingReport
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.bars import LETTERS, OWN
from rankscope_exporter.top.command import COLLECT_LIMIT, COLLECT_SECONDS, wait_until_judged


@pytest.fixture
def run(run_dir: Path) -> RunReport:
    return JudgedJob(run_dir).train(12)


def seconds_waited(runs: Callable[[], NodeReport]) -> float:
    """Return the seconds that it waits, by a clock that only sleeping advances."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    wait_until_judged(runs, lambda: now[0], sleep)
    return now[0]


def test_top_waits_ten_seconds_for_a_run_with_enough_steps(run: RunReport) -> None:
    assert seconds_waited(lambda: NodeReport(0.0, [run])) == COLLECT_SECONDS


def test_top_waits_longer_for_a_run_with_long_steps(run: RunReport) -> None:
    slow = replace(run, steps_per_second=0.5)
    assert seconds_waited(lambda: NodeReport(0.0, [run, slow])) == COLLECT_LIMIT


def test_top_waits_longer_while_a_rank_may_be_late_by_chance(run: RunReport) -> None:
    late = PendingReport("straggler", "other", 0.3, 1, "", "", "time", "", None, "")
    assert seconds_waited(lambda: NodeReport(0.0, [replace(run, pending=[late])])) == COLLECT_LIMIT
    low = replace(late, kind="low_utilization", rank=None, remaining_seconds=800.0)
    assert seconds_waited(lambda: NodeReport(0.0, [replace(run, pending=[low])])) == COLLECT_SECONDS


def test_top_waits_longer_for_a_run_without_data(run: RunReport) -> None:
    young = replace(run, window_seconds=None, steps_per_second=None)
    assert seconds_waited(lambda: NodeReport(0.0, [young])) == COLLECT_LIMIT


def test_top_does_not_wait_longer_for_a_run_that_makes_no_steps_has_ended_or_is_not_judged(run: RunReport) -> None:
    stuck = [replace(rank, stalled_seconds=20.0) for rank in run.ranks]
    young = replace(run, window_seconds=None)
    others = [replace(young, ranks=stuck), replace(young, living=0), replace(young, is_judged=False)]
    assert seconds_waited(lambda: NodeReport(0.0, others)) == COLLECT_SECONDS
    assert seconds_waited(lambda: NodeReport(0.0, [])) == COLLECT_SECONDS


def test_top_stops_waiting_if_the_ranks_cannot_be_read() -> None:
    def outdated() -> NodeReport:
        raise OutdatedError("too long ago")

    assert seconds_waited(outdated) == COLLECT_LIMIT


def test_a_missing_package_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankscope.cli.commands.REQUIRED", ("rich", "no_such_package"))
    with pytest.raises(SystemExit, match="2"):
        launch.main(["top"])
    assert capsys.readouterr().err == (
        "rankscope top: no_such_package missing; install with: pip install 'rankscope[top] @ git+https://github.com/rankscope/rankscope'\n"
    )
    assert missing(REQUIRED) == []


def test_top_reads_the_jobs_run_directory(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    assert default_run_dirs() == (run_dir,)
    monkeypatch.delenv("RANKSCOPE_RUN_DIR")
    assert [*map(str, default_run_dirs())] == ["/run/rankscope", "/dev/shm/rankscope"]


def test_every_phase_has_a_letter() -> None:
    assert {*LETTERS} == {*NAMES, OWN}
