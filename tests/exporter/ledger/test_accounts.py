"""Accounts of a run's GPU time over its whole life: the causes sum to the time of its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testing.judged_job import HUNG, JudgedJob
from testing.simulated_job import Plan, even, lagging

from rankscope.record import layout
from rankscope.record.quantities import percent
from rankscope.record.reader import read_rank
from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.diagnosis.saved import UNREADABLE
from rankscope_exporter.diagnosis.thresholds import Thresholds, change_thresholds
from rankscope_exporter.gpu.nvml.device import Memory
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.job_report import saved
from rankscope_exporter.job_report.job import Job
from rankscope_exporter.job_report.page import _findings
from rankscope_exporter.ledger import journal, state_file
from rankscope_exporter.ledger.account import GONE_LIMIT, Account, RankUse, account_from_json
from rankscope_exporter.ledger.accounts import Accounts
from rankscope_exporter.ledger.owner_files import FILE_LIMIT, OWNERS_LIMIT, OwnerFiles
from rankscope_exporter.ranks import look
from rankscope_exporter.ranks.rank import Scan

BOOTED = 1e9
"""The unix time at which the job's clock was 0."""


@pytest.fixture
def job(run_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> JudgedJob:
    job = JudgedJob(run_dir, state_dir=state_dir)
    monkeypatch.setattr(look, "time", SimpleNamespace(time=lambda: job.now + BOOTED))
    return job


def entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in journal.read(directory) if entry["entry"] == kind]


def account(directory: Path) -> dict[str, Any]:
    (found,) = entries(directory, "run")
    return found


def running(directory: Path) -> dict[str, Any]:
    (state,) = state_file.read(directory)
    return dict(state["account"])


def reported(directory: Path, *closed: JudgedJob) -> Job:
    """Return the report of the only job, after the end of its exporter."""
    for one in closed:
        one.diagnosis.close()
    (found,) = saved.jobs(directory)
    return found


def age(job: JudgedJob) -> float:
    return sum(rank.now - 1000.0 for rank in job.job.ranks)


def test_the_causes_sum_to_the_time_of_the_ranks_and_follow_the_judge(job: JudgedJob, state_dir: Path) -> None:
    job.train(60)
    job.finish()
    causes = account(state_dir)["causes"]
    assert sum(causes.values()) == pytest.approx(age(job), rel=0.001)
    assert causes["none"] / sum(causes.values()) == pytest.approx(8 / 9, rel=0.02)
    assert causes["transfer"] / sum(causes.values()) == pytest.approx(1 / 9, rel=0.1)


@pytest.fixture
def wrong_clock(job: JudgedJob, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock of the job's node, which is `wrong_by` some seconds."""
    clock = SimpleNamespace(wrong_by=0.0)
    monkeypatch.setattr(look, "time", SimpleNamespace(time=lambda: job.now + BOOTED + clock.wrong_by))
    return clock


@pytest.mark.parametrize("step", [-86_400.0, -600.0, 0.0, 600.0, 86_400.0])
def test_setting_the_clock_changes_neither_the_run_time_nor_the_findings(
    job: JudgedJob, state_dir: Path, wrong_clock: SimpleNamespace, step: float
) -> None:
    wrong_clock.wrong_by = -step
    job.train(20)
    wrong_clock.wrong_by = 0.0
    job.train(20)
    job.train(40, lagging("optimizer"))
    running = reported(state_dir, job)
    job.finish()
    for found in (running, reported(state_dir)):
        assert found.seconds == pytest.approx(80.0, abs=1.0)
        assert found.began == pytest.approx(BOOTED + 1000.0, abs=1.0)
        assert [finding.kind for finding in found.findings] == ["straggler"]


@pytest.mark.parametrize("step", [-600.0, 600.0])
def test_findings_from_before_the_clock_was_set_are_in_the_report(
    job: JudgedJob, state_dir: Path, wrong_clock: SimpleNamespace, step: float
) -> None:
    wrong_clock.wrong_by = -step
    job.train(20)
    job.train(40, lagging("optimizer"))
    job.train(120)
    assert [entry["kind"] for entry in entries(state_dir, "finding")] == ["straggler"]
    wrong_clock.wrong_by = 0.0
    job.train(2)
    job.finish()
    assert [finding.kind for finding in reported(state_dir).findings] == ["straggler"]


def test_time_before_the_exporter_saw_the_run_is_included(run_dir: Path, state_dir: Path) -> None:
    job = JudgedJob(run_dir, state_dir=state_dir)
    for rank in job.job.ranks:
        rank.spend("startup", 30.0)
    job.job.run(1000, even)
    job.train(20)
    job.finish()
    causes = account(state_dir)["causes"]
    assert sum(causes.values()) == pytest.approx(age(job), rel=0.001)
    assert causes["startup"] == pytest.approx(4 * 30.0, rel=0.01)
    assert causes["collective_wait"] == pytest.approx(4 * 5.0, rel=0.05), "the late ranks are unknown"


def test_a_run_with_ranks_on_other_nodes_is_divided_by_phase(run_dir: Path, state_dir: Path) -> None:
    job = JudgedJob(run_dir, state_dir=state_dir, world_size="8").trained(30)
    job.finish()
    found = account(state_dir)
    assert (len(found["ranks"]), found["world_size"]) == (4, 8)
    assert sum(found["causes"].values()) == pytest.approx(age(job), rel=0.001)
    assert found["causes"].keys() == {"startup", "none", "collective_wait"}


def test_a_gpu_whose_rank_has_ended_is_idle_while_others_are_alive(job: JudgedJob, state_dir: Path) -> None:
    job.train(30)
    for second in range(1, 21):
        job.poll(job.now + second, ended=[0])
    job.finish()
    causes = account(state_dir)["causes"]
    assert causes["idle"] == pytest.approx(20.0, abs=1.5)


def test_a_restart_of_the_exporter_loses_no_time(job: JudgedJob, state_dir: Path) -> None:
    job.train(60, lagging("optimizer"))
    job.diagnosis.close()
    before = running(state_dir)
    job.job.run(100, lagging("optimizer"))
    job.start_exporter()
    job.train(60, lagging("optimizer"))
    job.finish()
    causes = account(state_dir)["causes"]
    assert sum(causes.values()) == pytest.approx(age(job), rel=0.001)
    unseen = before["causes"]["collective_wait"]
    assert causes["collective_wait"] == pytest.approx(unseen), "one exporter or the other saw the rest"


def test_a_run_whose_records_are_gone_after_a_reboot_is_finished_unchanged(
    job: JudgedJob, state_dir: Path, run_dir: Path
) -> None:
    job.train(30)
    job.diagnosis.close()
    before = running(state_dir)
    for record in run_dir.iterdir():
        record.unlink()
    job.start_exporter()
    job.poll(job.now + 600)
    found = account(state_dir)
    assert found["causes"] == before["causes"]
    assert found["ended"] == before["at"]
    job.diagnosis.close()
    assert not [*state_file.read(state_dir)]


def test_the_entry_of_a_run_with_the_longest_names_is_far_below_the_limit(run_dir: Path, state_dir: Path) -> None:
    names = [f"{number}-{'x' * 190}" for number in range(21)]
    job = JudgedJob(run_dir, ranks=32, state_dir=state_dir, phases=names)
    job.job.run(10, even)
    for rank in job.job.ranks:
        for name in names:
            rank.spend(name, 1.0)
    job.poll(job.now)
    job.finish()
    assert len(account(state_dir)["causes"]) > len(names)
    assert len(json.dumps(account(state_dir))) < FILE_LIMIT / 16


def test_an_ended_finding_is_in_the_journal_with_its_begin_and_end(job: JudgedJob, state_dir: Path) -> None:
    job.train(60)
    begin = job.now
    job.train(60, lagging("optimizer"))
    end = job.now
    job.train(120)
    (found,) = entries(state_dir, "finding")
    assert (found["kind"], found["rank"], found["cause"], found["run"]) == ("straggler", "2", "optimizer", "r")
    assert found["begin"] - BOOTED == pytest.approx(begin, abs=15)
    assert end - 1 <= found["end"] - BOOTED < job.now
    assert 0.2 < found["ratio"] < 0.5
    assert found["sentence"]
    assert found["advice"]


def gpus(at: float) -> Mapping[str, RankGpu]:
    """Return four GPUs that are busy for half of the time, at 400 W, with 40 of 80 GB used."""
    counters, memory = GpuCounters(busy=at / 2), Memory(total=80, used=40, free=40)
    return {f"GPU-{n}": RankGpu(GpuReading(str(n)), counters, joules=400.0 * at, memory=memory) for n in range(4)}


def test_an_owner_has_a_gpu_if_the_driver_lists_a_process_of_its_ranks(run_dir: Path, state_dir: Path) -> None:
    judged = JudgedJob(run_dir, gpus=gpus, uuid="GPU-2").trained(1).look
    ranks = [replace(rank, snapshot=replace(rank.snapshot, lock_pid=77)) for rank in judged.scan.ranks]
    files = OwnerFiles(state_dir)
    for number in range(OWNERS_LIMIT):
        journal.Journal(files).append(f"{5000 + number}", {"run": "older"})
    for pids, is_admitted in ((), False), ((78,), False), ((77,), True):
        on_gpu = {uuid: gpu._replace(pids=pids) for uuid, gpu in judged.gpus.items()}
        found = judged._replace(scan=Scan(ranks, judged.scan.skipped), gpus=on_gpu)
        Accounts(files).update(found, {})
        assert files.admits(files.path("journal", ranks[0].run[1])) == is_admitted


def test_a_gpus_use_is_of_the_time_in_which_ranks_were_alive_on_it(run_dir: Path, state_dir: Path) -> None:
    job = JudgedJob(run_dir, ranks=1, gpus=gpus, state_dir=state_dir, uuid="GPU-2").trained(40)
    job.poll(job.now, ended=[0])
    job.poll(job.now + 100, ended=[0])
    (use,) = account(state_dir)["gpus"].values()
    assert (use["index"], use["node"]) == ("2", "node-a")
    assert use["seconds"] == pytest.approx(39, abs=1.5)
    assert use["busy"] / use["seconds"] == pytest.approx(0.5)
    assert use["joules"] / use["seconds"] == pytest.approx(400.0)
    assert (use["memory"], use["memory_total"]) == (40, 80)


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"causes": [1]},
        {"causes": {"none": "much"}},
        {"began": float("nan")},
        {"gpus": {"GPU-0": {}}},
        {"ranks": None},
    ],
)
def test_a_damaged_account_is_refused(job: JudgedJob, state_dir: Path, damage: dict[str, Any]) -> None:
    job.train(10)
    job.diagnosis.close()
    state = running(state_dir)
    assert account_from_json(state).run == "r"
    with pytest.raises((*UNREADABLE, AttributeError)):
        account_from_json({**state, **damage} if damage else {})


def test_a_run_that_keeps_using_new_rank_numbers_is_bounded_and_loses_no_cpu_time() -> None:
    account = Account("llm", "1000")
    for number in range(1_000):
        account.ranks[str(number)] = RankUse(0.0, cpu=2.0, cpu_before=1.0)
        account._forget_ranks({"0", str(number)})
    assert len(account.ranks) == GONE_LIMIT + 2
    assert {"0", "999"} <= account.ranks.keys()
    assert account.cpu_gone + 3.0 * len(account.ranks) == 3_000.0


STUCK = 40
"""Seconds of a hang that is found long before they are over."""


@pytest.fixture
def soon_found(job: JudgedJob) -> JudgedJob:
    """Return a job whose hangs are found after 20 s."""
    thresholds = change_thresholds(Thresholds(), {"stuck": 20.0, "stuck_floor": 10.0})
    job._settings = replace(job._settings, thresholds=thresholds)
    job.start_exporter()
    return job


@pytest.mark.parametrize("trained", range(30, 35))
def test_a_stall_counts_from_its_onset_in_the_report_and_in_the_metric(
    soon_found: JudgedJob, state_dir: Path, trained: int
) -> None:
    soon_found.train(trained)
    soon_found.wait(STUCK, HUNG)
    found = reported(state_dir, soon_found)
    assert found.ended is None
    assert found.causes["stall"] == pytest.approx(4 * STUCK, abs=4 * 0.5)
    counted = soon_found.diagnosis._lost["r", found.owner]["stall"]
    assert counted == pytest.approx(4 * STUCK, abs=4 * 6.0), "the metric is updated every 5 s"
    assert found.gpu_seconds == pytest.approx(4 * (trained + STUCK), rel=0.03)


def test_a_pause_that_is_no_hang_is_no_stall(soon_found: JudgedJob, state_dir: Path) -> None:
    soon_found.train(33)
    soon_found.wait(8, HUNG)
    soon_found.resume(8)
    soon_found.train(10)
    found = reported(state_dir, soon_found)
    assert "stall" not in found.causes
    assert found.gpu_seconds == pytest.approx(4 * 51, rel=0.05)


def test_the_sentence_of_a_finding_names_its_largest_ratio(job: JudgedJob, state_dir: Path) -> None:
    job.train(60)
    job.train(60, lagging("optimizer"))
    job.train(120)
    (entry,) = entries(state_dir, "finding")
    (found,) = saved._findings([entry], None)
    assert percent(found.ratio) in found.sentence
    assert found.mean is not None
    assert 0.0 < found.mean < found.ratio
    page_lines = " ".join(_findings(Job(["r"], "1", findings=[found], at=found.begin + 60)))
    assert f"at most {percent(found.ratio)}, {percent(found.mean)} on average" in " ".join(page_lines.split())


def read_at(at: float, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the report read records as of living ranks at that time. The kernel hides a process's own locks."""
    changes = {"alive": True, "read_monotonic": at, **changes}
    monkeypatch.setattr(saved, "read_rank", lambda path: replace(read_rank(path), **changes))


def test_a_running_job_is_counted_until_now_from_its_records(
    job: JudgedJob, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(30)
    job.diagnosis.close()
    job.job.run(500, even)
    read_at(job.now, monkeypatch)
    found = reported(state_dir)
    assert found.gpu_seconds == pytest.approx(age(job), rel=0.001)
    assert age(job) > 4 * 50.0


@pytest.mark.parametrize("seconds", [21, 22, STUCK])
def test_a_hang_is_counted_until_now_as_stall(
    soon_found: JudgedJob, state_dir: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    soon_found.train(33)
    soon_found.wait(seconds, HUNG)
    soon_found.diagnosis.close()
    read_at(soon_found.now + seconds + 100, monkeypatch)
    found = reported(state_dir)
    assert found.causes["stall"] == pytest.approx(4 * (seconds + 100), abs=4 * 0.5)
    ((_, shown),) = soon_found.diagnosis._accounts.gpu_seconds()
    assert shown["stall"] == pytest.approx(4 * seconds, abs=4 * 0.5)


@pytest.mark.parametrize("seconds", [1, 4, 8])
def test_the_time_after_a_hang_is_no_stall(
    soon_found: JudgedJob, state_dir: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    soon_found.train(33)
    soon_found.wait(STUCK, HUNG)
    soon_found.resume(STUCK)
    soon_found.train(seconds)
    soon_found.diagnosis.close()
    soon_found.job.run(500, even)
    read_at(soon_found.now, monkeypatch)
    found = reported(state_dir)
    assert found.causes["stall"] == pytest.approx(4 * STUCK, abs=4 * 1.5)


@pytest.mark.parametrize("change", ["all have ended", "another process", "no record"])
def test_a_job_is_not_continued_by_other_records(
    job: JudgedJob, state_dir: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    job.train(30)
    job.diagnosis.close()
    before = age(job)
    job.job.run(500, even)
    read_at(job.now, monkeypatch, alive=change != "all have ended")
    if change == "another process":
        job.job.ranks[3].writer.slots[layout.INDEX["started_monotonic"]] += 5.0
    if change == "no record":
        next(run_dir.iterdir()).unlink()
    found = reported(state_dir)
    assert found.gpu_seconds == pytest.approx(before, rel=0.001)


def test_a_finding_of_an_ended_run_is_over_when_the_run_is(job: JudgedJob, state_dir: Path) -> None:
    job.train(40)
    for second in range(1, 11):
        job.poll(job.now + second, ended=[2])
    job.poll(job.now + 11, ended=range(4))
    found = reported(state_dir)
    assert [(one.kind, one.end) for one in found.findings] == [("crash", found.ended)]


def test_a_second_fault_of_a_rank_has_its_own_entry_and_its_own_ratio(job: JudgedJob, state_dir: Path) -> None:
    job.train(40)
    job.train(60, lagging("optimizer"))
    job.train(60, mildly("backward"))
    job.train(100)
    first, second = entries(state_dir, "finding")
    assert [first["cause"], second["cause"]] == ["optimizer", "backward"]
    assert first["end"] <= second["end"]
    assert second["ratio"] < 0.8 * first["ratio"]


def mildly(phase: str) -> Plan:
    """Return a plan in which rank 2 spends a little longer in a phase."""
    return lambda step, rank: {**even(step, rank), phase: 0.038 if rank == 2 else 0.03}


def test_a_cause_that_was_shown_does_not_vanish(job: JudgedJob) -> None:
    for rank in job.job.ranks:
        rank.spend("startup", 5.0)
    job.poll(job.now)
    shown: set[str] = set()
    for _ in range(12):
        job.train(1)
        ((_, seconds),) = job.diagnosis._accounts.gpu_seconds()
        assert shown <= seconds.keys()
        shown |= seconds.keys()
    assert {"collective_wait", "transfer"} <= shown
