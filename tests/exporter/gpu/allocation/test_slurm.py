"""Slurm jobs from prolog files and from Slurm's cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.slurm import FILE_LIMIT, SlurmJobs, job_of_cgroup, parse_jobs

UUID = "GPU-51300000-0000-4000-8000-000000000000"


def test_files_named_by_index_or_uuid_list_the_jobs_of_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("4711\n")
    (tmp_path / UUID).write_text("4712 alice train large\n")
    (tmp_path / "1").write_text("")
    assert SlurmJobs(tmp_path).holders() == {
        "0": [Holder("slurm", slurm_job_id="4711")],
        UUID: [Holder("slurm", slurm_job_id="4712", user="alice", slurm_job_name="train large")],
        "1": [],
    }


def test_files_of_mig_instances_name_jobs_of_their_gpu(tmp_path: Path) -> None:
    for name, jobs in {
        "0.7": "4711\n",
        "0.13": "4712\n",
        "3.0": "4713\n",
        "3": "4714\n",
        "0.": "1\n",
        ".7": "1\n",
    }.items():
        (tmp_path / name).write_text(jobs)
    found = SlurmJobs(tmp_path).holders()
    assert {gpu: sorted(job.slurm_job_id for job in jobs) for gpu, jobs in found.items()} == {
        "0": ["4711", "4712"],
        "3": ["4713", "4714"],
    }


def test_known_fields_of_a_job_are_read_and_unknown_ones_ignored() -> None:
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


def test_a_job_name_from_an_older_prolog_is_not_parsed_as_fields() -> None:
    (job,) = parse_jobs("4711 alice user=root uid=0\n")
    assert job == Holder("slurm", slurm_job_id="4711", user="alice", slurm_job_name="user=root uid=0")


def test_jobs_that_share_a_gpu_have_one_line_each() -> None:
    assert [holder.slurm_job_id for holder in parse_jobs("1\n\n2 bob\n7_3\n8+1\n")] == ["1", "2", "7_3", "8+1"]


@pytest.mark.parametrize("text", ["", "\0\0\0", "job of alice", "12x alice", "-1"])
def test_lines_that_are_not_jobs_are_ignored(text: str) -> None:
    assert parse_jobs(text) == []


def test_a_missing_directory_counts_as_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = SlurmJobs(tmp_path / "later")
    assert "later does not exist" in caplog.text
    assert jobs.holders() == {}
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "3").write_text("5\n")
    assert list(jobs.holders()) == ["3"]


def test_files_that_are_not_regular_gpu_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("4711 root\n")
    (tmp_path / "0").symlink_to(tmp_path / "secret")
    (tmp_path / "1").mkdir()
    os.mkfifo(tmp_path / "2")
    (tmp_path / ".3.new").write_text("4711\n")
    assert SlurmJobs(tmp_path).holders() == {}


def test_a_huge_file_is_read_partially(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1\n" * FILE_LIMIT)
    assert len(SlurmJobs(tmp_path).holders()["0"]) == FILE_LIMIT // 2


def test_a_truncated_line_is_not_parsed_as_a_job(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1 " + "x" * (FILE_LIMIT - 5) + "\n" + "4711\n")
    assert [job.slurm_job_id for job in SlurmJobs(tmp_path).holders()["0"]] == ["1"]


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028"])
def test_a_job_name_cannot_end_a_line_and_is_sanitized(end: str) -> None:
    (job,) = parse_jobs(f"7 al\x1b[2Jice x{end}666 root {'y' * 4000}\n")
    assert (job.slurm_job_id, job.user) == ("7", "al?[2Jice")
    assert job.slurm_job_name.startswith("x?666 root y")
    assert len(job.slurm_job_name) == 200


def test_an_unreadable_directory_raises_an_error(tmp_path: Path) -> None:
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
        ("0::/user.slice/user-1000.slice/user@1000.service/slurm/job_4711\n", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/sF9EPK6QCKG300\n", ""),
        ("1:name=systemd:/user.slice/slurm/job_1\n9:memory:/slurm/uid_1000/job_4711\n", "4711"),
        ("0::/../../slurmstepd.scope/job_4711/step_0\n", "4711"),
        ("0::/kubepods.slice/cri-containerd-0123.scope/system.slice/slurmstepd.scope/job_4711/step_0\n", "4711"),
        ("", ""),
    ],
)
def test_a_process_belongs_to_the_job_of_its_cgroup(cgroup: str, job: str) -> None:
    assert job_of_cgroup(cgroup) == job
