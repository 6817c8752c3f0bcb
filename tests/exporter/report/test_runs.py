"""Reports of runs: findings, pending candidates, and the state of each rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from testing.judged_job import HUNG, JudgedJob
from testing.records import publish, rank_info
from testing.simulated_job import even, lagging

from rankscope.record.quantities import duration
from rankscope_exporter.diagnosis.findings import Candidate, Pending, Place
from rankscope_exporter.job_report import saved
from rankscope_exporter.ranks.collectors.findings import LOST_SECONDS, SPENT
from rankscope_exporter.ranks.judged_runs import CAUSES
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report import describe
from rankscope_exporter.report.analyzer import KNOWN_FOR, Analyzer
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.findings import LACKS, pending_reason, report_pending
from rankscope_exporter.report.runs import NOT_POLLED, NodeReport, Reporter, RunReport, ordered, report_of_look
from rankscope_exporter.top.explained import select


def test_a_healthy_run_has_no_finding_and_its_numbers(run_dir: Path) -> None:
    run = JudgedJob(run_dir).train(15)
    assert (run.is_judged, run.world_size, run.living, run.ended) == (True, 4, 4, 0)
    assert (list(run.findings), list(run.pending)) == ([], [])
    assert run.step_seconds == pytest.approx(0.045)
    assert run.steps_per_second == pytest.approx(1 / 0.045, rel=0.05)
    assert run.useful_ratio == pytest.approx(8 / 9, rel=0.05)
    assert run.lost == {"transfer": pytest.approx(1 / 9, rel=0.1)}
    assert not any(rank.waits_least for rank in run.ranks)


def test_time_that_only_the_gpu_knows_is_unknown_and_not_lost(run_dir: Path) -> None:
    """The hosts wait for their GPUs, on which no step has been measured."""
    job = JudgedJob(run_dir)
    run = job.train(15, lambda _step, _rank: {"forward": 0.004, "device_wait": 0.05})
    assert run.useful_ratio is None
    assert run.lost["unknown"] > 0.8
    assert "device_wait" not in run.lost
    said = " ".join(describe.summary(run))
    assert "unknown (the GPUs have not been measured yet)" in said
    assert "useful" not in said
    samples = [sample for family in job.findings.poll(job.look.scan) for sample in family.samples]
    by_cause = {one.labels["cause"]: one.value for one in samples if one.name == LOST_SECONDS.name}
    assert by_cause.keys() == {*CAUSES}
    assert sum(by_cause.values()) == 0.0
    spent = {one.labels["cause"]: one.value for one in samples if one.name == SPENT.name}
    assert sum(spent.values()) == pytest.approx(60.0, rel=0.1)
    assert spent["unknown"] > 0.8 * 60.0


def test_a_straggler_is_a_finding_with_its_sentence_and_advice(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(10)
    run = job.train(20, lagging("optimizer"))
    (finding,) = run.findings
    assert (finding.kind, finding.cause, finding.rank, finding.node) == ("straggler", "optimizer", 2, "node-a")
    assert finding.sentence.startswith("Rank 2 (node-a) slows down run r by ")
    assert finding.advice
    assert 0.0 < finding.age_seconds < 40.0
    assert finding.since == pytest.approx(job.look.unix - finding.age_seconds)
    assert [rank.rank for rank in run.ranks if rank.waits_least] == [2]


def test_ratios_are_of_the_last_window_and_not_of_the_whole_run(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(200, lagging("data_wait"))
    run = job.train(20)
    assert run.window_seconds is not None
    assert run.window_seconds < 20.0
    assert run.ranks[2].lag_ratio == pytest.approx(0.0, abs=0.01)
    assert run.ranks[2].phases.get("data_wait", 0.0) == pytest.approx(0.0, abs=0.01)


def test_a_straggler_with_few_steps_is_pending_with_the_reason(run_dir: Path) -> None:
    run = JudgedJob(run_dir).train(3, lagging("data_wait"))
    assert not run.findings
    (pending,) = (one for one in run.pending if one.kind == "straggler")
    assert (pending.rank, pending.lacks, pending.reason) == (2, "steps", LACKS["steps"])
    assert pending.sentence.startswith("Rank 2 (node-a) slows down run r")


def test_a_rank_that_others_wait_for_in_its_start_up_is_named_without_calling_it_a_hang() -> None:
    place, behind = Place(1, node="node-a", gpu="3"), {"ranks_behind": 1.0}
    candidate = Candidate("hang", 1.0, "startup", place, behind, lasted=60.0, needed=1800.0, lacks="startup")
    pending = report_pending(("r", "1000"), Pending(candidate, candidate.lacks, 1740.0))
    assert pending.sentence == "The other ranks of run r wait for rank 1 (node-a, GPU 3) in its start-up"
    assert pending_reason(pending) == "it may still load data, index or compile, 29 min more"
    assert not describe.is_growing(pending)


def test_a_hang_is_pending_with_its_rank_and_the_remaining_seconds_and_then_a_finding(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(100)
    run = job.wait(15, HUNG)
    (pending,) = (one for one in run.pending if one.kind == "hang")
    assert (pending.rank, pending.lacks) == (2, "time")
    assert pending.remaining_seconds is not None
    assert pending_reason(pending) == f"{LACKS['time']}, {duration(pending.remaining_seconds)} more"
    assert run.ranks[2].phase == "data_wait"
    assert run.ranks[2].phase_seconds == pytest.approx(15.0)
    (finding,) = job.wait(310, HUNG).findings
    assert (finding.kind, finding.severity, finding.rank, finding.cause) == ("hang", "critical", 2, "data_wait")


def test_what_was_measured_before_a_hang_is_not_shown_in_it(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(100, lagging("optimizer"))
    assert job.report().ranks[2].waits_least
    assert "rankscope_rank_lag_ratio" in metric_names(job)
    run = job.wait(15, HUNG)
    assert "rankscope_rank_lag_ratio" not in metric_names(job)
    assert {(rank.wait_ratio, rank.lag_ratio, rank.waits_least, rank.clock) for rank in run.ranks} == {
        (None, None, False, "host")
    }
    assert run.ranks[0].phases["collective_wait"] > 0.5
    assert run.step_seconds is None
    assert "no progress for 15 s" in [*describe.summary(run)]


def metric_names(job: JudgedJob) -> set[str]:
    """Return the names of the samples of the collector `findings` after another poll."""
    return {sample.name for family in job.findings.poll(job.look.scan) for sample in family.samples}


def test_the_ranks_of_a_run_that_is_not_diagnosed_here_and_stands_still_show_no_old_wait(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(40)
    assert job.report().ranks[0].wait_ratio is not None
    assert {rank.wait_ratio for rank in job.wait(10, HUNG).ranks} == {None}


def test_a_killed_rank_is_reported_with_its_end(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(15)
    for passed in (1, 2, 3):
        job.poll(job.now + passed, ended=[1])
    run = job.report()
    assert (run.living, run.ended) == (3, 1)
    assert (run.ranks[1].is_alive, run.ranks[1].ended, run.ranks[1].phase) == (False, "killed", None)


def test_a_run_with_ranks_elsewhere_is_not_judged_but_shows_the_waits_of_its_ranks_here(run_dir: Path) -> None:
    run = JudgedJob(run_dir, world_size="8").train(15, lagging("data_wait"))
    assert (run.is_judged, run.not_judged) == (False, "ranks_elsewhere")
    assert run.not_judged_reason == "only 4 of its 8 ranks are on this node"
    assert (list(run.findings), run.useful_ratio) == ([], None)
    waits = [rank.wait_ratio for rank in run.ranks]
    assert all(wait is not None for wait in waits)
    assert min(range(4), key=lambda rank: waits[rank] or 0.0) == 2


@pytest.mark.parametrize(("group", "is_known"), [("0-3", True), ("0-7", False), ("0,1,2,3,8…ab12cd34", False)])
def test_a_lag_is_known_only_of_a_group_that_is_whole_here(run_dir: Path, group: str, is_known: bool) -> None:
    """The last rank here may wait for a later one elsewhere."""
    run = JudgedJob(run_dir, world_size="8", group=group).train(15, lagging("data_wait"))
    assert [rank.lag_ratio is not None for rank in run.ranks] == [is_known] * 4
    assert [rank.waits_least for rank in run.ranks] == [False, False, is_known, False]
    assert all(rank.phases and rank.wait_ratio is not None for rank in run.ranks)


def analyzed(job: JudgedJob, address: str = "analyzer-0:10418") -> Reporter:
    """Return the job's reporter after a pull of the analyzer at this address."""
    reporter = job.reporter()
    reporter.analyzer.record_pull(address)
    return reporter


@pytest.mark.parametrize(
    ("labels", "judged_by"),
    [
        ({"world_size": "8"}, "analyzer-0:10418"),
        ({"uuid": "GPU-of-another-exporter"}, "analyzer-0:10418"),
        ({"world_size": ""}, None),
        ({}, None),
    ],
)
def test_a_run_of_several_nodes_has_the_analyzer_that_pulls_its_facts(
    run_dir: Path, labels: Mapping[str, str], judged_by: str | None
) -> None:
    job = JudgedJob(run_dir, **labels).trained(2)
    assert [run.judged_by for run in job.reporter().report().runs] == [None]
    assert [run.judged_by for run in analyzed(job).report().runs] == [judged_by]


def test_the_first_of_two_analyzers_is_named_until_it_stops_to_pull() -> None:
    now = [0.0]
    analyzer = Analyzer(lambda: now[0])
    assert analyzer.address is None
    for address in ("a:1", "b:1", "a:1"):
        analyzer.record_pull(address)
    now[0] = KNOWN_FOR
    assert analyzer.address == "a:1"
    now[0] += 1.0
    assert analyzer.address is None
    analyzer.record_pull("b:1")
    assert analyzer.address == "b:1"


@pytest.mark.parametrize("address", ["", "<b>", "http://a/", "a b", "a\n", "x" * 256, "é"])
def test_a_text_that_is_no_address_is_no_analyzer(address: str) -> None:
    analyzer = Analyzer(lambda: 0.0)
    analyzer.record_pull(address)
    assert analyzer.address is None


def test_what_is_known_here_of_a_run_of_several_nodes_is_stated_without_a_verdict(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8").trained(15)
    assert [*describe.known_here(job.report())] == [describe.BY_OTHERS]
    job.wait(40, HUNG)
    stalled, _ = describe.known_here(analyzed(job).report().runs[0])
    assert stalled == "No rank here has made progress for 40 s."
    job.poll(job.now + 45.0, ended=[1, 2])
    killed, *_, by = describe.known_here(analyzed(job).report().runs[0])
    assert killed == "Ranks 1-2 were killed."
    assert by == "Diagnosed by the analyzer at analyzer-0:10418."


def test_an_ended_run_is_undiagnosed_only_if_it_had_ranks_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    for directory, size, count in ((run_dir, "8", 1), (tmp_path, "4", 0)):
        job = JudgedJob(directory, world_size=size).trained(2)
        job.poll(job.now + 1.0, ended=range(4))
        assert len(describe.undiagnosed([job.report()])) == count


@pytest.mark.parametrize("size", ["", "many", "9" * 10, "9" * 200])
def test_an_invalid_or_huge_world_size_does_not_affect_other_runs(run_dir: Path, size: str) -> None:
    publish(run_dir, "s.0", {"started_monotonic": 900.0}, run="strange", rank="0", world_size=size, pid="1")
    job = JudgedJob(run_dir)
    for _ in range(2):
        job.job.run(20, even)
        job.poll(job.now)
    runs = {run.run: run for run in report_of_look(job.look).runs}
    assert runs["strange"].not_judged in ("ranks_elsewhere", "world_size_unknown")
    assert runs["r"].is_judged


def trainings(run_dir: Path, state_dir: Path | None = None) -> JudgedJob:
    """Return three processes that train on their own under one run's name."""
    job = JudgedJob(run_dir, ranks=3, state_dir=state_dir, world_size="1")
    for number, rank in enumerate(map(str, range(3))):
        info = rank_info(rank=rank, group=rank, world_size="1", node="node-a")
        job.job.ranks[number].writer.write_info(info)
    while job.now < 1020.0:
        job.job.run(20, even)
        job.poll(job.now)
    return job


def stop_second(job: JudgedJob, seconds: float) -> Sequence[RunReport]:
    """Let the second one stand still while the others train. Return all reports."""
    job.job.ranks[1].enter("forward")
    others = [rank for number, rank in enumerate(job.job.ranks) if number != 1]
    until = job.now + seconds
    while job.now < until:
        for rank in others:
            rank.spend("forward", 0.5)
            rank.step()
        job.poll(job.now)
    return report_of_look(job.look).runs


def test_trainings_with_one_name_are_diagnosed_apart_in_series_of_the_name_that_users_select(run_dir: Path) -> None:
    job = trainings(run_dir)
    runs = report_of_look(job.look).runs
    assert sorted(map(describe.name, runs)) == ["r", "r (rank 1)", "r (rank 2)"]
    assert all(run.is_judged and run.living == 1 for run in runs)
    assert len(select(NodeReport(0.0, runs), "r", None)) == 3
    found = {describe.name(run): [one.kind for one in run.findings] for run in stop_second(job, 400.0)}
    assert found == {"r": [], "r (rank 1)": ["hang"], "r (rank 2)": []}
    samples = [one for family in job.findings.poll(job.look.scan) for one in family.samples]
    keys = [(one.name, *sorted(one.labels.items())) for one in samples]
    assert len(keys) == len(set(keys))
    assert {one.labels["run"] for one in samples} == {"r"}
    ratios = [one.value for one in samples if one.name == "rankscope_run_lost_ratio"]
    assert sum(ratios) == pytest.approx(1.0)
    hangs = [one.labels["rank"] for one in samples if one.labels.get("kind") == "hang"]
    assert set(hangs) == {"1"}


def test_trainings_with_one_name_at_the_same_time_are_one_job_of_the_report(run_dir: Path, state_dir: Path) -> None:
    job = trainings(run_dir, state_dir)
    stop_second(job, 400.0)
    job.diagnosis.close()
    (reported,) = saved.jobs(state_dir)
    assert (reported.ranks, [one.kind for one in reported.findings]) == (3, ["hang"])
    assert reported.gpu_seconds == pytest.approx(3 * (job.now - 1000.0), rel=0.05)


def test_living_runs_come_first_and_the_worst_of_them_before_others(run_dir: Path) -> None:
    (run_dir / "a").mkdir()
    job = JudgedJob(run_dir / "a").trained(10)
    healthy, faulty = job.report(), job.train(20, lagging("optimizer"))
    (finding,) = faulty.findings
    worse, hung = replace(finding, ratio=0.9), replace(finding, severity="critical")
    found = {"mild": [finding], "grave": [worse], "hung": [finding, hung]}
    runs = [healthy, *(replace(faulty, run=run, findings=findings) for run, findings in found.items())]
    ended = replace(faulty, run="ended", living=0)
    assert [run.run for run in ordered([ended, *runs])] == ["hung", "grave", "mild", "r", "ended"]


def test_json_has_no_nan_and_escapes_text_from_users(run_dir: Path) -> None:
    run = JudgedJob(run_dir, run='<script>"é').train(3)
    rank = replace(run.ranks[0], wait_ratio=math.nan, lag_ratio=math.inf, phases={"forward": -math.inf})
    text = as_json(NodeReport(1.0, [replace(run, ranks=[rank])]))
    assert text.isascii()
    (found,) = json.loads(text, parse_constant=pytest.fail)["runs"]
    assert found["run"] == '<script>"é'
    assert [found["ranks"][0][name] for name in ("wait_ratio", "lag_ratio", "phases")] == [
        None,
        None,
        {"forward": None},
    ]


def test_a_report_without_a_recent_poll_shows_the_ranks_and_judges_nothing(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(15)
    scan = job.look.scan
    for look, now in ((None, job.now), (job.look, job.now + 6.0)):
        (run,) = Reporter(lambda: scan, lambda look=look: look, monotonic=lambda now=now: now).report().runs
        assert (run.not_judged, len(run.ranks), run.ranks[0].phases) == (NOT_POLLED, 4, {})


def test_outdated_ranks_are_not_reported(run_dir: Path) -> None:
    with pytest.raises(OutdatedError):
        Reporter(lambda: None, lambda: JudgedJob(run_dir).trained(1).look).report()
