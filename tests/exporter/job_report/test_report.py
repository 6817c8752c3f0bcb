"""`rankscope report`: a job's GPU time by cause, from the exporter's state or the ranks' records."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing.judged_job import JudgedJob
from testing.records import publish
from testing.simulated_job import lagging

from rankscope.record import layout
from rankscope_exporter.job_report import records, saved, slurm
from rankscope_exporter.job_report.command import ReportRequest, show
from rankscope_exporter.job_report.job import Allocation, Gpu, Job, JobFinding, NoJobError, merge_jobs, select_job
from rankscope_exporter.job_report.page import Prices, group_lines, lines
from rankscope_exporter.job_report.short import LIMIT, as_json
from rankscope_exporter.ledger import journal
from rankscope_exporter.ledger.owner_files import OwnerFiles

SLURM = {"job_id": "4711", "job_name": "train large", "account": "physics", "partition": "gpu"}


@pytest.fixture(autouse=True)
def controller(monkeypatch: pytest.MonkeyPatch) -> dict[str, Allocation]:
    """Return the allocations that the simulated controller knows, by job."""
    known: dict[str, Allocation] = {}
    monkeypatch.setattr(slurm, "ask", known.get)
    return known


@pytest.fixture
def ended(run_dir: Path, state_dir: Path) -> JudgedJob:
    """Return a Slurm job with a slow rank, which has ended."""
    job = JudgedJob(run_dir, state_dir=state_dir, slurm=SLURM).trained(40)
    job.train(40, lagging("optimizer"))
    job.finish()
    return job


def a_job(**changes: Any) -> Job:
    known: dict[str, Any] = {
        "runs": ["train"],
        "owner": "1000",
        "slurm": SLURM,
        "nodes": ["node-a"],
        "ranks": 2,
        "began": 1e9,
        "ended": 1e9 + 3600,
        "at": 1e9 + 3600,
        "causes": {"none": 5400.0, "data": 1440.0, "straggler": 360.0},
    }
    return Job(**{**known, **changes})


def page(job: Job, **prices: float) -> str:
    return "\n".join(lines(job, Prices(**prices)))


Printed = Callable[..., str]


@pytest.fixture
def printed(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return a function that returns what the command prints, by default about the exporter's state."""

    def printed(**fields: Any) -> str:
        assert show(ReportRequest(**({"state_dir": state_dir} | fields))) == 0
        return capsys.readouterr().out

    return printed


@pytest.mark.usefixtures("ended")
def test_a_job_is_found_by_its_slurm_number_and_its_page_names_the_slow_rank(printed: Printed) -> None:
    text = printed(job_id="4711")
    assert "Slurm job 4711 (train large) of " in text
    assert "account physics, partition gpu" in text
    assert "4 ranks on 1 node (node-a)" in text
    assert "Rank 2 (node-a) slows down run r by" in text
    assert re.search(r"lost: straggler +\[\|+ +\]", text)


def test_the_page_says_where_the_job_was_captured(run_dir: Path, state_dir: Path, printed: Printed) -> None:
    job = JudgedJob(run_dir, state_dir=state_dir).trained(20)
    (run,) = job.look.readings
    job.diagnosis.add_capture(run, "/captures/r-1-hang")
    job.diagnosis.add_capture(("other", run[1]), "/captures/other-1-hang")
    job.poll(job.now)
    job.finish()
    job.diagnosis.close()
    text = printed(run="r")
    assert "Captures\n  /captures/r-1-hang/report.html\n" in text
    assert "other-1-hang" not in text


@pytest.mark.parametrize(
    ("kind", "sentence", "ratio", "mean", "said"),
    [
        ("straggler", "Rank 2 slows down run r by 44%", 0.44, 0.28, "by 44% (at most 44%, 28% on average over 80 s)"),
        ("straggler", "Rank 2 slows down run r by 44%", 0.44, None, "by 44% (at most 44%)"),
        ("straggler", "Rank 2 slows down run r by 44%", 0.44, 0.441, "by 44%"),
        ("low_utilization", "busy only 30% of the time", 0.7, 0.6, "(at least 30%, 40% on average over 80 s)"),
        ("hang", "Run r hangs", 1.0, 0.9, "Run r hangs"),
    ],
)
def test_a_finding_says_which_number_its_sentence_has(
    kind: str, sentence: str, ratio: float, mean: float | None, said: str
) -> None:
    found = JobFinding(100.0, 180.0, kind, "warning", ratio, sentence, mean=mean)
    shown = page(a_job(findings=[found])).partition("Findings")[2].partition("Notes")[0]
    assert " ".join(shown.split()).endswith(said)


def test_a_crash_has_a_time_and_no_duration() -> None:
    crash = JobFinding(100.0, 101.0, "crash", "critical", 1.0, "Rank 2 of run r was killed")
    assert re.search(r"\n  [\d-]+ [\d:]+, critical: Rank 2 of run r was killed", page(a_job(findings=[crash])))


@pytest.mark.usefixtures("ended")
def test_the_json_sums_to_one_and_fits_an_admin_comment(printed: Printed) -> None:
    text = printed(job_id="4711", is_json=True)
    found = json.loads(text)
    assert found["useful"] + sum(found["lost"].values()) == pytest.approx(1.0, abs=1e-9)
    assert found["gpu_hours"] == pytest.approx(4 * 80 / 3600, rel=0.02)
    assert len(text) < LIMIT


@pytest.mark.usefixtures("ended")
def test_allocated_time_without_a_rank_is_a_cause(controller: dict[str, Allocation], printed: Printed) -> None:
    controller["4711"] = Allocation("COMPLETED", 100.0, 5, 16)
    found = json.loads(printed(job_id="4711", is_json=True))
    assert found["gpu_hours"] == pytest.approx(500 / 3600, rel=0.001)
    assert found["lost"]["no_rank"] == pytest.approx((500 - 320) / 500, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "gpus", "trained", "no_rank"),
    [
        ((4,), 2, 3000.0, 2 * 600.0),
        ((3,), 1, 3000.0, 600.0),
        ((2,), 2, 3000.0, 2 * 600.0),
        ((2,), 4, 3000.0, 2 * 600.0 + 2 * 3600.0),
        ((4, 4), 4, 3000.0, 4 * 600.0),
        ((1, 1, 1), 2, 3600.0, 0.0),
    ],
    ids=[
        "two ranks on a GPU",
        "three ranks on a GPU",
        "one rank",
        "unused GPUs",
        "two runs at once",
        "no time without",
    ],
)
def test_parts_sum_to_the_run_time_of_the_gpus_that_ranks_share(
    ranks: tuple[int, ...], gpus: int, trained: float, no_rank: float
) -> None:
    causes = [{"none": 0.9 * trained * count, "data": 0.1 * trained * count} for count in ranks]
    runs = [
        a_job(runs=[str(n)], ranks=count, causes=causes[n], began=1e9, ended=1e9 + trained, at=1e9 + trained)
        for n, count in enumerate(ranks)
    ]
    job = merge_jobs(runs).with_allocation(Allocation("COMPLETED", 3600.0, gpus, 0), now=2e9)
    assert job.gpu_seconds == pytest.approx(3600.0 * gpus)
    assert job.causes.get("no_rank", 0.0) == pytest.approx(no_rank)
    assert job.causes["none"] / job.causes["data"] == pytest.approx(9.0)


def test_a_short_run_next_to_another_changes_its_parts_only_by_its_own_time() -> None:
    train = a_job(ranks=4, causes={"none": 4 * 3600.0})
    both = merge_jobs([train, a_job(runs=["eval"], ranks=1, began=1e9 + 60, ended=1e9 + 70, causes={"data": 10.0})])
    job = both.with_allocation(Allocation("COMPLETED", 3600.0, 4, 0), now=2e9)
    assert job.causes["none"] == pytest.approx(4 * 3600.0 - 10.0, abs=0.1)


def test_a_requeued_job_keeps_the_time_of_both_runs() -> None:
    first, again = a_job(causes={"none": 7200.0}), a_job(began=1e9 + 7200, ended=1e9 + 9000, causes={"none": 3600.0})
    job = merge_jobs([first, again]).with_allocation(Allocation("COMPLETED", 1800.0, 2, 0), now=2e9)
    assert job.causes == {"none": 10_800.0}


def test_a_partial_job_is_not_compared_with_its_whole_allocation(
    run_dir: Path, state_dir: Path, controller: dict[str, Allocation], printed: Printed
) -> None:
    controller["4711"] = Allocation("COMPLETED", 100.0, 8, 16)
    job = JudgedJob(run_dir, state_dir=state_dir, slurm=SLURM, world_size="8").trained(30)
    job.finish()
    text = printed()
    assert "4 of 8 ranks" in text
    assert "no_rank" not in text


def test_time_of_a_running_job_since_the_last_save_is_not_a_loss() -> None:
    job = a_job(ended=None, causes={"none": 7200.0}).with_allocation(
        Allocation("RUNNING", 3660.0, 2, 0), now=1e9 + 3660
    )
    assert job.causes == {"none": 7200.0}


def test_a_live_run_is_reported_with_its_open_findings(run_dir: Path, state_dir: Path, printed: Printed) -> None:
    job = JudgedJob(run_dir, state_dir=state_dir).trained(40)
    job.train(40, lagging("optimizer"))
    job.diagnosis.close()
    text = printed()
    assert re.search(r"to now: .*\n", text)
    assert re.search(r"to now \(.*\), .*: Rank 2", text)


def test_records_without_an_exporter_are_reported_by_phase(run_dir: Path, printed: Printed) -> None:
    startup = float(layout.PHASES.index("startup"))
    slots = {"phase": startup, "started_unix": 1e9, "started_monotonic": 100.0, "ended": 1.0, "ended_unix": 1e9 + 100}
    for rank in range(2):
        publish(run_dir, f"r.{rank}", slots, rank=str(rank), world_size="2", node="node-a")
    found = json.loads(printed(state_dir=None, run_dir=run_dir, is_json=True))
    assert found["gpu_hours"] == pytest.approx(200 / 3600, rel=0.001)
    assert found["lost"] == {"startup": 1.0}


@pytest.mark.parametrize("ended_unix", [1e9 + 100, 0.0], ids=["ended", "killed"])
def test_records_of_several_nodes_have_their_own_clocks(run_dir: Path, ended_unix: float) -> None:
    forward = float(layout.PHASES.index("forward"))
    slots = {"phase": forward, "started_unix": 1e9, "ended": float(ended_unix > 0), "ended_unix": ended_unix}
    for rank, uptime in enumerate((100.0, 5e6)):
        seconds = {"started_monotonic": uptime, "phase_seconds": 40.0}
        publish(run_dir, f"r.{rank}", slots | seconds, rank=str(rank), world_size="2", node=f"node-{rank}", boot_id="x")
    (job,) = records.jobs(run_dir)
    lasted = 100.0 if ended_unix else 40.0
    assert (job.began, job.ended, job.at) == (1e9, 1e9 + lasted, 1e9 + lasted)
    assert job.gpu_seconds == pytest.approx(2 * lasted)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"state_dir": Path("absent")}, "absent is not a directory"),
        ({"run_dir": Path("absent")}, "absent is not a directory"),
        ({"state_dir": Path("x" * 300)}, "File name too long: give the exporter's --state-dir, as a user who may read"),
        ({"run_dir": Path("x" * 300)}, "File name too long"),
        ({}, "--state-dir, --url or a run directory"),
        ({"by": "user"}, "give --url"),
        ({"url": "nonsense"}, "nonsense is not a URL"),
    ],
)
def test_without_data_the_reason_is_printed(
    fields: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(ReportRequest(**fields)) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("hidden", ["", "state-*", "journal-*"])
@pytest.mark.usefixtures("ended")
def test_a_state_that_the_user_may_not_read_is_one_error(
    state_dir: Path, hidden: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, method = (os, "open") if hidden else (Path, "stat")
    real = getattr(owner, method)

    def denying(path: Path | str, *arguments: Any, **options: Any) -> Any:
        if Path(path).match(hidden) if hidden else path == state_dir:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(owner, method, denying)
    assert show(ReportRequest(state_dir=state_dir)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"{state_dir}.*: Permission denied: give the exporter's --state-dir, as a user who may", line)


def test_another_users_run_with_the_same_name_is_not_reported() -> None:
    mine, forged = a_job(), a_job(owner="1001", user="eve", causes={"none": 1.0})
    with pytest.raises(NoJobError, match="several users"):
        select_job([mine, forged], None, "4711", None)
    assert select_job([mine, forged], None, "4711", "1000") == mine
    with pytest.raises(NoJobError, match="no data of Slurm job 4711 of owner 1002"):
        select_job([mine, forged], None, "4711", "1002")


def test_several_runs_have_to_be_named_and_the_last_one_of_a_name_is_reported() -> None:
    first, again, other = a_job(), a_job(began=2e9), a_job(runs=["other"])
    with pytest.raises(NoJobError, match="several runs"):
        select_job([first, again, other], None, None, None)
    assert select_job([first, again, other], "train", None, None) == again


def test_all_runs_of_a_slurm_job_are_one_report() -> None:
    gpu = Gpu("node-a", "0", joules=5.0, memory=1.0, memory_total=4.0)
    first = a_job(gpus=[gpu], findings=[JobFinding(1e9, 1e9 + 1, "data", "warning", 0.1, "x")])
    second = a_job(runs=["eval"], began=2e9, ended=2e9 + 60, at=2e9 + 60, gpus=[gpu], causes={"none": 120.0})
    both = merge_jobs([second, first])
    assert both.runs == ["train", "eval"]
    assert (both.began, both.ended) == (1e9, 2e9 + 60)
    assert both.gpu_seconds == 7320.0
    assert [(one.index, one.joules) for one in both.gpus] == [("0", 10.0)]
    assert merge_jobs([first, a_job(ended=None)]).ended is None


def test_costs_are_for_gpu_hours_and_energy() -> None:
    gpus = [Gpu("node-a", str(n), joules=1.8e6) for n in range(2)]
    text = page(a_job(gpus=gpus), gpu_hour=2.0, kwh=0.3)
    assert "1 kWh, 0.30 at 0.3 per kWh" in text
    assert "4.00 at 2 per GPU-hour, 1.00 of it lost" in text


def test_unused_resources_are_noted() -> None:
    gpus = [Gpu("node-a", "0", 0.9), Gpu("node-a", "1", 0.0)]
    text = page(a_job(gpus=gpus, cpus=64, cpu_seconds=7200.0))
    assert "No kernel ran on node-a GPU 1" in text
    assert "2.0 of 64 CPU cores" in text
    assert "20% of the job's GPU time is lost to data." in text


@pytest.mark.parametrize("letter", ["x", '"', "\u8bad", "\U0001f600"])
def test_a_long_report_is_cut_to_the_length_of_a_comment(letter: str) -> None:
    causes = {f"{n}-{letter * 150}": 1.0 for n in range(64)} | {"none": 100.0}
    findings = [JobFinding(1e9, None, "data", "warning", 0.1, letter * 500) for _ in range(50)]
    gpus = [Gpu("node-a", str(n), 0.51234, 1.0, 3.0, 1.23456e9) for n in range(8)]
    job = a_job(causes=causes, findings=findings, runs=[letter * 128], gpus=gpus, cpu_seconds=1.23456e9, cpus=4096)
    text = as_json(job, Prices(2.5, 0.3))
    assert len(text.encode()) <= LIMIT
    found = json.loads(text)
    assert found["useful"] + sum(found["lost"].values()) == pytest.approx(1.0, abs=1e-9)
    assert found["lost"]["rest"] > 0.1


def test_the_json_survives_sacctmgr_which_replaces_quotation_marks_with_backticks() -> None:
    found = [JobFinding(1e9, None, "data", "warning", 0.1, 'a `b` "c"')]
    text = as_json(a_job(runs=["`r`"], findings=found), Prices())
    assert json.loads(text.replace('"', "`").replace("`", '"')) == json.loads(text)
    assert json.loads(text)["findings"][0][2] == "a 'b' \"c\""


def test_names_from_users_are_escaped_for_the_terminal(state_dir: Path, printed: Printed) -> None:
    entry: dict[str, Any] = {"user": "", "slurm": {"job_id": "7", "job_name": "\x1b[2J"}, "nodes": ["a\nb"], "gpus": {}}
    entry |= {"run": "r\x1b]0;x", "owner": "1", "began": 1.0, "at": 2.0, "ended": 2.0, "steps": 1.0, "ranks": {}}
    entry |= {
        "world_size": 1,
        "causes": {"\x9b1m": 1.0},
        "cpus": 0,
        "memory": 0.0,
        "findings": {},
        "rank_count": 1,
        "cpu_gone": 0.0,
    }
    journal.Journal(OwnerFiles(state_dir)).append("1", {"entry": "run", **entry})
    text = printed()
    assert "\\x1b[2J" in text
    assert not set(text) & {"\x1b", "\x9b"}


@pytest.mark.parametrize("damage", [{"causes": [1]}, {"began": None}, {"gpus": {"0": {}}}, {"ranks": 3}])
@pytest.mark.usefixtures("ended")
def test_a_damaged_entry_does_not_affect_other_jobs(state_dir: Path, damage: dict[str, Any]) -> None:
    (entry,) = [one for one in journal.read(state_dir) if one["entry"] == "run"]
    journal.Journal(OwnerFiles(state_dir)).append(entry["owner"], {**entry, "run": "damaged", **damage})
    assert [job.runs for job in saved.jobs(state_dir)] == [["r"]]


def test_gpu_hours_of_groups_are_sorted_by_the_loss() -> None:
    groups = {"alice": {"none": 3600.0, "data": 360.0}, "bob": {"none": 0.0, "idle": 7200.0}, "": {"none": 36.0}}
    _, _, first, second, third = group_lines(groups, "user", 7.0, Prices(gpu_hour=3.0))
    assert first.split() == ["bob", "2", "0%", "2", "6.00", "idle", "100%"]
    assert second.split()[0] == "alice"
    assert "data 9.1%" in second
    assert third.startswith("  (unknown)")


SHOWN = (
    "JobId=6 JobName=train large UserId=alice(1001) GroupId=alice(1001) JobState=COMPLETING Reason=None "
    "RunTime=1-02:03:04 TimeLimit=UNLIMITED NodeList=vm NumNodes=2 NumCPUs=64 {gpus} Comment=RunTime=9-00:00:00 \n"
)


@pytest.mark.parametrize(
    ("gpus", "count"),
    [
        ("TRES=cpu=64,node=2,billing=64 JOB_GRES=gpu:8   Nodes=vm GRES= TresPerNode=gres:gpu:4", 8),
        ("JOB_GRES=gpu:a100:4,gpu:h100:2   Nodes=vm GRES=gpu:2(IDX:0-1)", 6),
        ("AllocTRES=cpu=64,mem=1M,node=2,billing=64,gres/gpu=8,gres/gpu:a100=8 TresPerNode=gres/gpu:4", 8),
    ],
    ids=["22.05", "types", "accounting"],
)
def test_run_time_gpus_and_cpus_are_read_from_slurm(gpus: str, count: int) -> None:
    seconds = ((26 * 60) + 3) * 60 + 4.0
    assert slurm.parse(SHOWN.format(gpus=gpus)) == Allocation("COMPLETING", seconds, count, 64)


@pytest.mark.parametrize("text", ["", "JobId=6", SHOWN.format(gpus="TRES=cpu=1"), SHOWN.replace("RunTime", "Run")])
def test_text_without_gpus_or_a_run_time_is_not_an_allocation(text: str) -> None:
    assert slurm.parse(text.format(gpus="") if "{" in text else text) is None


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a program that replaces scontrol."""
    monkeypatch.undo()  # the simulated controller
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "scontrol"


def answering(program: Path, answers: dict[str, bytes]) -> None:
    """Let scontrol know these jobs."""
    for name, answer in answers.items():
        (program.parent / f"{name}.job").write_bytes(answer)
    program.write_text(f'#!/bin/sh\nfor job; do :; done\nexec cat "{program.parent}/$job.job"\n')
    program.chmod(0o755)


def test_a_job_is_found_by_its_array_and_task_or_its_sluid(scontrol: Path) -> None:
    answering(
        scontrol, {"36_2": b"JobId=38 ArrayJobId=36 ", "7+1": b"JobId=8 HetJobId=7 ", "s9G5M8BD1KND00": b"JobId=9 "}
    )
    asked = ("36_2", "7+1", "s9G5M8BD1KND00", "36", "36_3", "-a_1", "../36_2")
    assert [slurm.number(name) for name in asked] == ["38", "8", "9", "36", "36_3", "-a_1", "../36_2"]


@pytest.mark.usefixtures("ended")
def test_the_report_of_an_array_task_is_that_of_its_job(scontrol: Path, printed: Printed) -> None:
    answering(scontrol, {"4700_11": b"JobId=4711 ArrayJobId=4700 ArrayTaskId=11 "})
    assert "Slurm job 4711 (train large)" in printed(job_id="4700_11")


def test_a_job_name_in_any_encoding_does_not_affect_the_report(scontrol: Path) -> None:
    text = SHOWN.format(gpus="JOB_GRES=gpu:8").encode().replace(b"train large", b"tr\xe4n")
    answering(scontrol, {"6": text})
    found = slurm.ask("6")
    assert found
    assert (found.gpus, found.cpus) == (8, 64)


def test_without_a_controller_there_is_no_allocation(scontrol: Path) -> None:
    answering(scontrol, {})
    assert slurm.ask("6") is None
