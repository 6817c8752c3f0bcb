"""The prolog and epilog script, run like slurmd does, and read by the exporter."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.deploy.slurmd import Slurmd

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.slurm import SlurmJobs

SLUID = "s9G5M8BD1KND00"


@pytest.fixture
def slurmd(tmp_path: Path) -> Slurmd:
    return Slurmd(tmp_path / "rankscope-slurm")


def test_a_job_has_its_gpus_from_its_prolog_to_its_epilog(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", ACCOUNT="physics", GPUS="0,3")
    assert slurmd.jobs == {gpu: [("7", "alice", "physics")] for gpu in "03"}
    slurmd.runs("epilog", ID="7", USER="alice", GPUS="0,3")
    assert slurmd.jobs == {}


def test_a_line_has_the_number_first_and_then_the_other_fields(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", UID="1001", USER="alice", ACCOUNT="physics", PARTITION="gpu", SLUID=SLUID, GPUS="0")
    line = f"7 uid=1001 user=alice account=physics partition=gpu sluid={SLUID}\n"
    assert (slurmd.directory / "0").read_text() == line
    assert SlurmJobs(slurmd.directory).holders() == {
        "0": [
            Holder(
                "slurm",
                slurm_job_id="7",
                uid="1001",
                user="alice",
                slurm_account="physics",
                slurm_partition="gpu",
                sluid=SLUID,
            )
        ]
    }


def test_the_epilog_also_removes_a_job_of_an_older_prolog(slurmd: Slurmd) -> None:
    slurmd.directory.mkdir()
    (slurmd.directory / "0").write_text("7 alice train large\n77\n")
    slurmd.runs("epilog", ID="7", GPUS="0")
    assert slurmd.jobs == {"0": [("77", "", "")]}


def test_jobs_that_share_a_gpu_start_and_end_independently(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    slurmd.runs("prolog", ID="77", USER="bob", GPUS="0")
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    assert slurmd.jobs == {"0": [("7", "alice", ""), ("77", "bob", "")]}
    slurmd.runs("epilog", ID="7", GPUS="0")
    assert slurmd.jobs == {"0": [("77", "bob", "")]}


def test_a_job_without_gpus_writes_nothing(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice")
    assert not slurmd.directory.exists()


GPU, MIG = "GPU-51300000-0000-4000-8000-00000000000", "MIG-51300000-0000-4000-8000-00000000000"


@pytest.mark.parametrize(
    ("numbers", "visible", "names"),
    [
        ("0,3", "0,3", ["0", "3"]),
        ("0,3", "", ["0", "3"]),
        ("5,6", f"{MIG}1,{MIG}2", [f"{MIG}1", f"{MIG}2"]),
        ("0,7", f"{MIG}1,7", [f"{MIG}1", "7"]),
        ("0,1", f"{GPU}2,{GPU}3", [f"{GPU}2", f"{GPU}3"]),
        ("0,1", f"MIG-{GPU}2/7/0,MIG-{GPU}2/8/0", [f"{GPU}2"]),
    ],
    ids=["numbers", "numbers alone", "MIG", "MIG and a whole GPU", "25.11", "MIG before driver 470"],
)
def test_files_are_named_by_the_uuids_that_slurm_knows(
    slurmd: Slurmd, numbers: str, visible: str, names: list[str]
) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS=numbers, visible=visible)
    assert slurmd.jobs == {name: [("7", "alice", "")] for name in names}
    slurmd.runs("epilog", ID="7", GPUS=numbers, visible=visible)
    assert slurmd.jobs == {}


@pytest.mark.parametrize("gpus", ["", "1", "0,5"])
def test_the_epilog_removes_the_job_from_all_files(slurmd: Slurmd, gpus: str) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0,1")
    slurmd.runs("prolog", ID="77", USER="bob", GPUS="1,2")
    slurmd.runs("epilog", ID="7", GPUS=gpus, visible=f"{MIG}1")
    assert slurmd.jobs == {"1": [("77", "bob", "")], "2": [("77", "bob", "")]}


def test_an_epilog_changes_no_file_of_other_jobs(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="77", USER="bob", GPUS="0")
    before = (slurmd.directory / "0").stat()
    slurmd.runs("epilog", ID="7", GPUS="0")
    assert (slurmd.directory / "0").stat().st_ino == before.st_ino


def test_no_temporary_file_remains(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    assert sorted(path.name for path in slurmd.directory.iterdir()) == [".lock", "0"]


@pytest.mark.parametrize("mode_before", [None, 0o644, 0o666])
def test_no_other_user_can_open_the_lock_to_block_a_prolog(slurmd: Slurmd, mode_before: int | None) -> None:
    if mode_before is not None:  # created by an earlier version or another program
        slurmd.directory.mkdir()
        (slurmd.directory / ".lock").touch()
        (slurmd.directory / ".lock").chmod(mode_before)
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    assert stat.S_IMODE((slurmd.directory / ".lock").stat().st_mode) == 0o600
    assert stat.S_IMODE((slurmd.directory / "0").stat().st_mode) == 0o644


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize(("context", "job"), [("prolog", "77"), ("prolog", "7"), ("epilog", "8")])
def test_a_full_disk_removes_no_job(tmp_path: Path, shell: str, context: str, job: str) -> None:
    slurmd = Slurmd(tmp_path / "rankscope-slurm", shell)
    for earlier in ("8", "7"):
        slurmd.runs("prolog", ID=earlier, GPUS="0")
    before = slurmd.jobs
    (slurmd.directory / ".0.new").symlink_to("/dev/full")
    slurmd.runs(context, ID=job, is_full=True, GPUS="0")
    assert slurmd.jobs == before
    slurmd.runs("epilog", ID="7", GPUS="0")  # control: there is space again
    assert slurmd.jobs == {"0": [("8", "", "")]}
