"""A node that does not answer: no false finding, open ones stay for a while, and a run that stands still names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.analyzed_job import SLOW, AnalyzedJob

from rankscope_exporter.diagnosis.words import sentence, where


@pytest.fixture
def job(tmp_path: Path) -> AnalyzedJob:
    """Return a healthy job on two nodes."""
    return AnalyzedJob(tmp_path).train(60)


def hang_in(job: AnalyzedJob, phases: dict[int, str], seconds: int = 400) -> None:
    for rank, phase in phases.items():
        job.job.ranks[rank].enter(phase)
    job.wait(seconds)


def test_ranks_of_a_node_that_does_not_answer_are_no_finding(job: AnalyzedJob) -> None:
    job.silent = {1}
    job.train(100, SLOW)
    assert not job.kinds()
    assert list(job.analyzer.missing.values()) == [["node-1"]]
    assert {verdict.is_ready for verdict in job.verdicts[-3:]} == {True}


def test_an_open_finding_stays_for_a_minute_after_its_node_is_silent(job: AnalyzedJob) -> None:
    assert [finding.kind for finding in job.train(20, SLOW).findings()] == ["straggler"]
    job.silent = {1}
    assert [finding.kind for finding in job.train(50, SLOW).findings()] == ["straggler"]
    assert not job.train(40, SLOW).findings()
    assert job.kinds() == {"straggler"}


def test_a_node_that_answers_again_sends_what_was_missed(job: AnalyzedJob) -> None:
    job.train(20, SLOW).silent = {1}
    job.train(30, SLOW).silent = set()
    (finding,) = job.train(15, SLOW).findings()
    assert finding.candidate.place.rank == 3
    (found,) = job.diagnosis.look.readings.values()
    assert not any(one.is_missing for one in found)
    assert len({id(verdict) for verdict in job.verdicts}) == len(job.verdicts)


def test_a_run_that_stands_still_while_a_node_is_silent_hangs_because_of_that_node(job: AnalyzedJob) -> None:
    job.silent = {1}
    hang_in(job, {0: "collective_wait", 1: "collective_wait", 2: "collective_wait", 3: "data_wait"})
    (finding,) = job.findings()
    place = finding.candidate.place
    assert (finding.kind, finding.candidate.cause) == ("hang", "node_missing")
    assert (place.rank_label, place.node, place.place) == ("2-3", "node-1", "node node-1")
    assert where(finding.candidate) == "Node node-1 (ranks 2-3)"
    assert job.kinds() == {"hang"}


def test_a_hang_on_two_nodes_names_the_rank_that_the_others_wait_for(job: AnalyzedJob) -> None:
    hang_in(job, {0: "collective_wait", 1: "collective_wait", 2: "data_wait", 3: "collective_wait"})
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.rank) == ("hang", "data_wait", 2)


def test_a_killed_rank_is_a_crash_also_while_another_node_is_silent(job: AnalyzedJob) -> None:
    job.silent = {1}
    job.train(20)
    job.wait(12, ended=[0])
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.rank) == ("crash", "killed", 0)


def test_a_run_of_which_no_node_answers_is_neither_a_hang_nor_a_crash(job: AnalyzedJob) -> None:
    assert job.train(20, SLOW).findings()
    job.silent = {0, 1}
    assert job.train(30).findings()
    assert not job.train(400).findings()
    assert job.kinds() == {"straggler"}


def test_a_node_that_never_had_an_exporter_is_missing_after_the_first_steps(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path)
    job.silent = {1}
    job.train(60, SLOW)
    assert not job.kinds()
    assert list(job.analyzer.missing.values()) == [["unknown"]]
    hang_in(job, {0: "collective_wait", 1: "collective_wait"})
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.ranks) == ("hang", "node_missing", (2, 3))


def test_a_crash_on_one_node_is_found_although_the_other_one_has_gone_with_it(job: AnalyzedJob) -> None:
    job.silent = {1}
    job.wait(30, ended=[0, 1])
    assert [(finding.kind, finding.candidate.cause) for finding in job.findings()] == [("crash", "killed")]


def test_a_run_of_which_no_node_answers_is_forgotten(job: AnalyzedJob) -> None:
    job.silent = {0, 1}
    job.wait(600)
    assert job.diagnosis.look.readings
    job.wait(1000)
    assert not job.diagnosis.look.readings


def test_the_first_of_ranks_on_two_nodes_that_were_killed_at_once_is_unknown(job: AnalyzedJob) -> None:
    job.train(2)
    job.wait(12, ended=[1, 2])
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.place.rank, finding.candidate.place.ranks) == ("crash", None, (1, 2))
    assert sentence(("r", "0"), finding.candidate).startswith("Set of ranks 1-2 of run r was killed")


def test_of_ranks_on_one_node_the_first_one_is_named(job: AnalyzedJob) -> None:
    job.train(2)
    job.wait(12, ended=[0, 1])
    (finding,) = job.findings()
    assert finding.candidate.place.rank in (0, 1)
