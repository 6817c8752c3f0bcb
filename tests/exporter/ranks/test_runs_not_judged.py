"""Runs that are not judged because of limits: the metric, the log, and what pages say of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client.samples import Sample
from testing.judged_job import JudgedJob
from tests.exporter.web.test_status_page import top

from rankscope_exporter.diagnosis.judged import Limits
from rankscope_exporter.top.explained import as_lines
from rankscope_exporter.web.status_page import render_status


@pytest.fixture
def job(run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> JudgedJob:
    """Return a job that its exporter may not judge."""
    caplog.set_level(logging.WARNING)
    job = JudgedJob(run_dir)
    monkeypatch.setattr(job.diagnosis._judges, "_limits", Limits(ranks=3))
    return job.trained(12)


def samples(job: JudgedJob) -> dict[str, list[Sample]]:
    """Return the samples of one more poll by the name of their metric."""
    families = job.findings.poll(job.look.scan)
    return {family.name: family.samples for family in families}


def test_a_run_beyond_a_limit_is_counted_by_owner_and_not_listed_as_judged(job: JudgedJob) -> None:
    found = samples(job)
    (sample,) = found["rankscope_exporter_runs_not_judged"]
    assert (sample.labels, sample.value) == ({"owner": job.report().owner, "reason": "too_many_runs"}, 1.0)
    assert found["rankscope_run_judged_info"] == []


def test_an_ended_run_beyond_a_limit_is_not_counted(job: JudgedJob) -> None:
    job.poll(job.now + 1, ended=range(4))
    assert samples(job)["rankscope_exporter_runs_not_judged"] == []


def test_it_is_logged_once_while_it_lasts(job: JudgedJob, caplog: pytest.LogCaptureFixture) -> None:
    job.train(120)
    (line,) = [record.getMessage() for record in (*caplog.get_records("setup"), *caplog.records)]
    assert f"most_of={job.report().owner} runs=1 reason=too_many_runs" in line


def test_it_is_logged_at_most_once_a_minute(
    job: JudgedJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(100):
        monkeypatch.setattr(job.diagnosis._judges, "_limits", Limits(ranks=3 + turn % 2))
        job.train(1)
    assert len([*caplog.get_records("setup"), *caplog.records]) == 2


def test_no_page_says_that_it_has_no_problem(job: JudgedJob) -> None:
    page, lines = render_status([], job.reporter()), [*as_lines([job.report()])]
    assert "No problem found" not in page
    assert 'class="verdict good"' not in page
    assert "Run r is not diagnosed here: its owner, or this node, has too many runs." in top(page)
    assert not any("No problem" in line for line in lines)
