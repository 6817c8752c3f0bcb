"""Restarts of the analyzer and of exporters, and processes that are seen twice."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from testing.analyzed_job import SLOW, AnalyzedJob
from testing.simulated_job import even

from rankscope_exporter.ledger import journal
from rankscope_exporter.node_facts.recorder import NodeFacts


def test_a_restarted_analyzer_resumes_open_findings(tmp_path: Path, state_dir: Path) -> None:
    job = AnalyzedJob(tmp_path / "job", state_dir=state_dir, ahead=[0.0, 3600.0]).train(60)
    (before,) = job.train(20, SLOW).findings()
    job.analyzer.close()
    job.start_analyzer()
    (after,) = job.train(3, SLOW).findings()
    assert (after.kind, after.candidate.place) == (before.kind, before.candidate.place)
    assert after.since == pytest.approx(before.since, abs=2.0)
    began = {reading.began for reading in next(iter(job.diagnosis.look.readings.values()))}
    assert [finding.kind for finding in job.train(20, SLOW).findings()] == ["straggler"]
    assert {reading.began for reading in next(iter(job.diagnosis.look.readings.values()))} == began


def test_a_restarted_analyzer_goes_on_with_the_account(tmp_path: Path, state_dir: Path) -> None:
    job = AnalyzedJob(tmp_path / "job", state_dir=state_dir).train(40).train(30, SLOW)
    ((_, before),) = job.diagnosis.spent
    job.analyzer.close()
    job.start_analyzer()
    ((_, after),) = job.train(10).diagnosis.spent
    assert before["straggler"] <= after["straggler"] < 1.2 * before["straggler"]
    assert sum(after.values()) == pytest.approx(sum(before.values()) + 4 * 10.0, abs=8.0)


def test_a_run_that_is_gone_after_a_restart_of_the_analyzer_is_in_the_journal(tmp_path: Path, state_dir: Path) -> None:
    job = AnalyzedJob(tmp_path / "job", state_dir=state_dir).train(40)
    job.analyzer.close()
    job.start_analyzer()
    job.silent = {0, 1}
    job.train(30)
    assert not [*journal.read(state_dir)]
    job.train(60)
    (entry,) = journal.read(state_dir)
    assert (entry["entry"], entry["nodes"]) == (journal.FINISHED, ["node-0", "node-1"])


def test_an_analyzer_without_a_state_finds_the_slow_rank_again(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(60).train(20, SLOW)
    job.start_analyzer()
    (finding,) = job.train(60, SLOW).findings()
    assert finding.candidate.place.rank == 3


def test_a_restarted_exporter_ends_no_finding(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(60).train(20, SLOW)
    job.silent = {1}
    job.train(10, SLOW)
    job.silent = set()
    job.nodes[1].start_exporter()
    job.facts[1] = NodeFacts("node-1", boot="boot of node-1")
    job.nodes[1].diagnosis.listeners = [job.facts[1].record]
    job.verdicts.clear()
    job.train(30, SLOW)
    assert all([finding.kind for finding in verdict.findings] == ["straggler"] for verdict in job.verdicts)


def test_a_better_clock_offset_is_no_restart(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path).train(30)
    job.ahead[1] += 0.5
    job.train(5)
    (finding,) = job.train(30, SLOW).findings()
    assert finding.candidate.place.rank == 3
    assert job.kinds() == {"straggler"}


def test_a_process_that_two_exporters_show_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = AnalyzedJob(tmp_path)
    job.facts.append(job.facts[1])
    job.ahead.append(0.0)
    job.train(60)
    (found,) = job.diagnosis.look.readings.values()
    assert sorted(one.rank for one in found) == [0, 1, 2, 3]
    (finding,) = job.train(20, SLOW).findings()
    assert finding.candidate.place.rank == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def next_to(tmp_path: Path, first: str, second: str) -> AnalyzedJob:
    """Return a job next to which another one of its name runs on a third node, each in a Slurm job."""
    job = AnalyzedJob(tmp_path / "first", slurm={"job_id": first}).train(60)
    other = AnalyzedJob(tmp_path / "second", start=job.now, slurm={"job_id": second})
    job.facts.append(NodeFacts("node-9", boot="boot of node-9"))
    job.ahead.append(0.0)
    other.nodes[0].diagnosis.listeners = [job.facts[2].record]
    for _ in range(20):
        job.train(1)
        while other.now < job.now:
            other.job.run(1, even)
        other.nodes[0].poll(job.now)
    job.pull(job.now)
    return job


def test_of_two_living_processes_the_first_one_stays_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = next_to(tmp_path, "", "")
    (found,) = job.diagnosis.look.readings.values()
    assert {one.node for one in found} == {"node-0", "node-1"}
    assert caplog.text.count("several processes are the same rank") == 1
    (finding,) = job.train(20, SLOW).findings()
    assert finding.candidate.place.rank == 3


def test_two_slurm_jobs_of_one_name_are_two_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = next_to(tmp_path, "7", "8")
    assert {run[0]: {one.node for one in found if one.node} for run, found in job.diagnosis.look.readings.items()} == {
        "r": {"node-0", "node-1"},
        "r (job 8)": {"node-9"},
    }
    assert not caplog.text
    (finding,) = job.train(20, SLOW).findings()
    assert finding.candidate.place.rank == 3


def test_a_run_that_starts_again_on_other_nodes_is_judged_without_the_old_records(tmp_path: Path) -> None:
    job = AnalyzedJob(tmp_path / "first").train(60)
    job.wait(9, ended=range(4))
    again = AnalyzedJob(tmp_path / "second", start=job.now + 20.0)
    job.facts += [NodeFacts("node-2", boot="boot of node-2"), NodeFacts("node-3", boot="boot of node-3")]
    job.ahead += [0.0, 0.0]
    for node, facts in zip(again.nodes, job.facts[2:], strict=True):
        node.diagnosis.listeners = [facts.record]
    for second in range(60):
        again.train(1, SLOW if second >= 20 else even)
        for node in job.nodes:
            node.poll(again.now, range(4))
        job.pull(again.now)
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.place.rank) == ("straggler", 3)
