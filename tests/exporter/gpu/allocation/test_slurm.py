"""Slurm's jobs, from what a prolog leaves and from cgroups as Slurm makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.slurm import FILE_LIMIT, SlurmJobs, job_of_cgroup, parse_jobs

UUID = "GPU-51300000-0000-4000-8000-000000000000"


def test_a_file_a_gpu_named_by_index_or_uuid_names_its_jobs(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n")
    (tmp_path / UUID).write_text("4712 alice train large\n")
    (tmp_path / "1").write_text("")
    assert SlurmJobs(tmp_path).holders() == {
        "0": [Holder("slurm", slurm_job_id="4711")],
        UUID: [Holder("slurm", slurm_job_id="4712", user="alice", slurm_job_name="train large")],
        "1": [],
    }


def test_what_slurmd_knows_of_a_job_is_read_and_what_is_unknown_left_alone() -> None:
    text = "4711 uid=1001 user=alice account=physics=x partition=gpu qos=high sluid=s9G5M8BD1KND00\n4712 uid=7\n"
    assert parse_jobs(text) == [
        Holder(
            "slurm",
            slurm_job_id="4711",
            uid="1001",
            user="alice",
            slurm_account="physics=x",
            slurm_partition="gpu",
            sluid="s9G5M8BD1KND00",
        ),
        Holder("slurm", slurm_job_id="4712", uid="7"),
    ]


def test_a_name_that_an_older_prolog_left_is_no_field() -> None:
    (job,) = parse_jobs("4711 alice user=root uid=0\n")
    assert job == Holder("slurm", slurm_job_id="4711", user="alice", slurm_job_name="user=root uid=0")


def test_jobs_that_share_a_gpu_have_a_line_each() -> None:
    assert [holder.slurm_job_id for holder in parse_jobs("1\n\n2 bob\n7_3\n8+1\n")] == ["1", "2", "7_3", "8+1"]


@pytest.mark.parametrize("text", ["", "\0\0\0", "job of alice", "12x alice", "-1"])
def test_what_is_no_job_counts_as_nothing(text: str) -> None:
    assert parse_jobs(text) == []


def test_a_directory_that_no_prolog_has_made_yet_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = SlurmJobs(tmp_path / "later")
    assert "later does not exist yet" in caplog.text
    assert jobs.holders() == {}
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "3").write_text("5\n")
    assert list(jobs.holders()) == ["3"]


def test_what_is_no_regular_file_of_a_gpu_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("4711 root\n")
    (tmp_path / "0").symlink_to(tmp_path / "secret")
    (tmp_path / "1").mkdir()
    os.mkfifo(tmp_path / "2")
    (tmp_path / ".3.new").write_text("4711\n")
    assert SlurmJobs(tmp_path).holders() == {}


def test_a_huge_file_is_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1\n" * FILE_LIMIT)
    assert len(SlurmJobs(tmp_path).holders()["0"]) == FILE_LIMIT // 2


def test_of_a_job_that_is_cut_off_no_other_is_made(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1 " + "x" * (FILE_LIMIT - 5) + "\n" + "4711\n")
    assert [job.slurm_job_id for job in SlurmJobs(tmp_path).holders()["0"]] == ["1"]


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028"])
def test_a_jobs_name_ends_no_line_and_is_fit_for_a_label(end: str) -> None:
    (job,) = parse_jobs(f"7 al\x1b[2Jice x{end}666 root {'y' * 4000}\n")
    assert (job.slurm_job_id, job.user) == ("7", "al?[2Jice")
    assert job.slurm_job_name.startswith("x?666 root y")
    assert len(job.slurm_job_name) == 200


def test_a_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SlurmJobs(tmp_path / "file").holders()


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n", "4711"),
        ("0::/system.slice/node7_slurmstepd.scope/job_4711/step_batch/slurm\n", "4711"),
        ("11:devices:/slurm/uid_1000/job_4711/step_0/task_0\n1:name=systemd:/\n", "4711"),
        ("9:memory:/slurm_node7/uid_1000/job_4711\n", "4711"),
        ("0::/system.slice/slurmstepd.scope/sF9EPK6QCKG300/step_0/user/task_0\n", "sF9EPK6QCKG300"),
        ("0::/system.slice/node7_slurmstepd.scope/s0123456789ABC\n", "s0123456789ABC"),
        ("0::/system.slice/slurmstepd.scope/system/slurmstepd\n", ""),
        ("0::/system.slice/slurmstepd.scope/sF9EPK6QCKG30I/step_0\n", ""),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("0::/user.slice/job_4711/step_0\n", ""),
        ("", ""),
    ],
)
def test_a_process_is_in_the_job_of_its_cgroup(cgroup: str, job: str) -> None:
    assert job_of_cgroup(cgroup) == job
