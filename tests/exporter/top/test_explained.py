"""The output of `rankscope explain` on a node where no Prometheus answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import lagging

from rankscope.cli.explaining.command import show
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, UnreachableError
from rankscope.record.quantities import duration
from rankscope_exporter.report.findings import LACKS, PendingReport
from rankscope_exporter.report.runs import report_of_look
from rankscope_exporter.top.explained import as_lines, in_short, select


def test_findings_are_explained_with_their_age_and_advice_in_ten_lines(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    (finding,) = job.train(20, lagging("optimizer")).findings
    lines = [*as_lines(select(report_of_look(job.look), None, None))]
    assert len(lines) <= 10
    assert lines[0].startswith("Run r, uid 0: 4 of 4 ranks, ")
    assert lines[1].startswith("WARNING for ")
    assert lines[1].endswith(finding.sentence)
    assert lines[2] == f"  {finding.advice}"


def test_each_of_several_runs_has_a_line(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    healthy, slow = job.report(), job.train(20, lagging("optimizer"))
    (finding,) = slow.findings
    twice = replace(slow, run="slow", findings=[finding, finding])
    part = replace(healthy, run="part", is_judged=False, not_judged_reason="it is new")
    head, *lines = in_short([twice, part, healthy])
    assert head == "3 runs, the worst first (--run explains one, --all each of them)"
    assert lines == [
        f"Run slow, uid 0: WARNING for {duration(finding.age_seconds)}: {finding.sentence} (and 1 more)",
        "Run part, uid 0: Run part is not diagnosed here: it is new.",
        "Run r, uid 0: No problem found.",
    ]


def test_a_healthy_run_has_no_problem(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(12)
    assert [*as_lines(select(report_of_look(job.look), None, None))][1:] == ["No problem found."]


def test_a_run_that_is_not_judged_is_not_reported_as_healthy(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(12)
    assert [*as_lines(select(report_of_look(job.look), None, None))][1:] == [
        "Run r is not diagnosed here: only 4 of its 8 ranks are on this node.",
        "  An analyzer that asks the exporters of all its nodes diagnoses it (`rankscope-exporter --analyze`).",
    ]


@pytest.mark.parametrize(
    ("user", "owner", "title"),
    [("alice", "1000", "Run r, user alice"), ("", "1000", "Run r, uid 1000"), ("", "", "Run r")],
)
def test_a_run_is_shown_with_its_owner(run_dir: Path, user: str, owner: str, title: str) -> None:
    run = replace(JudgedJob(run_dir).train(2), user=user, owner=owner)
    assert next(as_lines([run])).startswith(f"{title}: 4 of 4 ranks, ")


@pytest.mark.parametrize(
    ("run", "owner", "is_found"), [(None, None, True), ("r", None, True), ("s", None, False), ("r", "12345", False)]
)
def test_only_the_requested_run_is_explained(run_dir: Path, run: str | None, owner: str | None, is_found: bool) -> None:
    job = JudgedJob(run_dir).trained(2)
    assert bool(select(report_of_look(job.look), run, owner)) == is_found


def refuse(error: PrometheusError) -> Prometheus:
    raise error


@pytest.mark.parametrize(
    ("error", "at", "is_json", "is_explained"),
    [
        (UnreachableError("cannot reach it"), None, False, True),
        (UnreachableError("cannot reach it"), "30m", False, False),
        (UnreachableError("cannot reach it"), None, True, False),
        (PrometheusError("it has no rules"), None, False, False),
    ],
)
def test_the_node_is_explained_only_for_now_and_if_no_server_answers(
    capsys: pytest.CaptureFixture[str], error: PrometheusError, at: str | None, is_json: bool, is_explained: bool
) -> None:
    status = show(
        "http://localhost:9090",
        None,
        None,
        None,
        at,
        is_json,
        lambda _url, _at: refuse(error),
        explain_node=lambda: True,
    )
    assert status == (0 if is_explained else 2)
    assert bool(capsys.readouterr().err) != is_explained


def test_the_error_is_printed_if_the_node_has_no_run_either(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnreachableError("cannot reach it")
    arguments = "http://localhost:9090", None, None, None, None, False
    assert show(*arguments, lambda _url, _at: refuse(error), explain_node=lambda: False) == 2
    assert "cannot reach it" in capsys.readouterr().err


def test_a_run_that_may_hang_is_not_called_free_of_problems(run_dir: Path) -> None:
    job = JudgedJob(run_dir)
    job.train(30)
    assert "No problem found." in [*as_lines([job.report()])]
    job.wait(8, HUNG)
    found = [*as_lines([job.report()])]
    assert "No problem found." not in found
    assert "No finding yet: no progress for 8 s, rank 2 in data_wait." in found
    assert any("hangs" in line for line in found)


def test_what_a_finding_explains_is_shown_only_on_request(run_dir: Path) -> None:
    run = JudgedJob(run_dir).trained(10).train(20, lagging("optimizer"))
    pending = PendingReport(
        "data", "io", 0.2, None, "", "", "explained", LACKS["explained"], None, "Run r waits for data"
    )
    run = replace(run, pending=[pending])
    (line,) = set(as_lines([run], with_explained=True)) - set(as_lines([run]))
    assert line == "Not yet an alert: Run r waits for data (another finding explains it)"


def test_the_summary_names_the_time_that_it_is_about(run_dir: Path) -> None:
    run = JudgedJob(run_dir).trained(10).train(20)
    assert run.window_seconds is not None
    assert f"of its GPU time in the last {duration(run.window_seconds)}: 89% useful" in next(as_lines([run]))
