"""Faults of the analyzer's own: it stops, its clock and the nodes' clocks differ, exporters are slow or lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.analyzed_job import SLOW, AnalyzedJob, Clock

from rankscope_exporter.analyzer import merge
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.node_facts.wire import Answer, Moment

DAYS = 10 * 86_400.0


@pytest.fixture
def job(tmp_path: Path) -> AnalyzedJob:
    """Return a healthy job on two nodes."""
    return AnalyzedJob(tmp_path).train(60)


def slow_rank(job: AnalyzedJob) -> Finding:
    """Return the only finding that there was: a slow rank."""
    (finding,) = job.findings()
    assert job.kinds() == {"straggler"}
    assert finding.candidate.place.rank == 3
    return finding


def go_on(job: AnalyzedJob) -> None:
    """Let a stopped analyzer go on. It judges before it asks, and asks until it has all answers."""
    job.is_stopped = False
    job.judge(job.now)
    for _ in range(6):
        job.ask(job.now)
    for _ in range(10):
        job.judge(job.now)


def drifting(rate: float, since: float) -> Clock:
    return lambda at: at + DAYS + rate * (at - since)


def suspended(seconds: float, since: float) -> Clock:
    """Return a clock that has not counted the seconds of a suspend."""
    return lambda at: at if at < since else max(since, at - seconds)


@pytest.mark.parametrize(("rate", "within"), [(200e-6, 2.0), (-200e-6, 2.0), (0.02, 4.0)])
def test_a_clock_that_drifts_changes_no_finding(job: AnalyzedJob, tmp_path: Path, rate: float, within: float) -> None:
    drifts = AnalyzedJob(tmp_path / "drifts")
    drifts.clocks[1] = drifting(rate, drifts.now)
    since = [slow_rank(one.train(60).train(20, SLOW)).since - one.now for one in (job, drifts)]
    assert since[1] == pytest.approx(since[0], abs=within)


def test_a_clock_that_has_stopped_for_a_while_is_no_restart(job: AnalyzedJob) -> None:
    began = {one.rank: one.began for one in next(iter(job.diagnosis.look.readings.values()))}
    job.silent = {1}
    job.wait(20)
    job.clocks[1] = suspended(20.0, job.now)
    job.silent = set()
    slow_rank(job.train(40).train(20, SLOW))
    assert {one.rank: one.began for one in next(iter(job.diagnosis.look.readings.values()))} == began


def test_an_open_finding_stays_the_same_over_a_stop_of_the_analyzer(job: AnalyzedJob) -> None:
    before = slow_rank(job.train(20, SLOW))
    job.is_stopped = True
    job.train(30, SLOW)
    job.verdicts.clear()
    go_on(job)
    after = slow_rank(job.train(15, SLOW))
    assert after.since == pytest.approx(before.since, abs=2.0)
    assert all([one.kind for one in verdict.findings] == ["straggler"] for verdict in job.verdicts)


def test_no_node_is_missing_after_a_stop_of_the_analyzer(job: AnalyzedJob) -> None:
    job.is_stopped = True
    job.train(30)
    go_on(job)
    assert not job.analyzer.missing
    for _ in range(5):
        job.train(3)
        assert not job.analyzer.missing


def test_a_rank_that_was_slow_during_a_stop_is_found_with_its_begin(job: AnalyzedJob) -> None:
    job.is_stopped = True
    job.train(5)
    onset = job.now
    job.train(25, SLOW)
    go_on(job)
    assert slow_rank(job).since == pytest.approx(onset, abs=4.0)


@pytest.mark.parametrize("stop", [30, 200])
def test_a_hang_during_a_stop_of_the_analyzer_is_found(job: AnalyzedJob, stop: int) -> None:
    job.is_stopped = True
    onset = job.now
    for rank, phase in enumerate(["collective_wait", "collective_wait", "data_wait", "collective_wait"]):
        job.job.ranks[rank].enter(phase)
    job.wait(stop)
    job.is_stopped = False
    job.judge(onset + stop)
    for second in range(stop, 400):
        job.poll(onset + second)
    (finding,) = job.findings()
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.rank) == ("hang", "data_wait", 2)
    assert job.kinds() == {"hang"}
    assert finding.since == pytest.approx(onset, abs=5.0)


def test_a_node_that_is_gone_does_not_delay_the_diagnosis(job: AnalyzedJob) -> None:
    job.silent = {1}
    job.train(60)
    assert job.now - job.diagnosis.look.at < 2.0


def test_a_slow_exporter_causes_no_false_finding(job: AnalyzedJob) -> None:
    job.delays[1] = 4.0
    slow_rank(job.train(60).train(40, SLOW))


def test_the_boots_that_a_target_invents_are_forgotten() -> None:
    joining = merge.Merge()
    for number in range(100):
        at, moments = float(number), [Moment(at=float(number))]
        for name, boot in (("liar", f"boot {number}"), ("honest", "boot")):
            joining.take(name, Answer(version=1, node=name, boot=boot, now=at, moments=moments), at + 1.0, at + 1.0)
        joining.join(at + 1.0)
    assert joining.anchors == {"boot 99": 1.0, "boot": 1.0}


def test_the_state_of_a_run_has_the_clocks_of_its_own_nodes(tmp_path: Path, state_dir: Path) -> None:
    job = AnalyzedJob(tmp_path / "job", state_dir=state_dir)
    for number in range(10):
        answer = Answer(version=1, node="idle", boot=f"idle boot {number}", now=0.0, moments=[])
        job.analyzer.take(f"idle-{number}", answer, 1.0, 1.0)
    job.train(60).analyzer.close()
    (saved,) = [path.read_text() for path in state_dir.glob("*.jsonl")]
    assert "boot of node-1" in saved
    assert "idle boot" not in saved


def test_a_restored_finding_keeps_its_begin_although_the_first_answers_are_late(
    tmp_path: Path, state_dir: Path
) -> None:
    job = AnalyzedJob(tmp_path / "job", state_dir=state_dir).train(60)
    before = slow_rank(job.train(40, SLOW))
    job.analyzer.close()
    job.start_analyzer()
    job.is_stopped = True
    job.train(7, SLOW)
    job.is_stopped = False
    assert slow_rank(job.train(3, SLOW)).since == pytest.approx(before.since, abs=0.5)
