"""The prolog and epilog script as slurmd runs it, and what the exporter reads of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rankscope_exporter.gpu.allocation.slurm import SlurmJobs

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "gpu_jobs.sh"


class Slurmd:
    """Runs the script with nothing in its environment but what slurmd puts there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def runs(self, context: str, **variables: str) -> None:
        environment = {"RANKSCOPE_SLURM_DIR": str(self.directory), "SLURM_SCRIPT_CONTEXT": f"{context}_slurmd"}
        environment |= {f"SLURM_JOB_{name}": value for name, value in variables.items()}
        done = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "a prolog that fails drains the node"

    @property
    def jobs(self) -> dict[str, list[tuple[str, str, str]]]:
        found = SlurmJobs(self.directory).holders()
        return {gpu: [(job.slurm_job_id, job.user, job.slurm_job_name) for job in jobs] for gpu, jobs in found.items()}


@pytest.fixture
def slurmd(tmp_path: Path) -> Slurmd:
    return Slurmd(tmp_path / "rankscope-slurm")


def test_a_job_has_its_gpus_from_its_prolog_to_its_epilog(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", NAME="train large", GPUS="0,3")
    assert slurmd.jobs == {gpu: [("7", "alice", "train large")] for gpu in "03"}
    slurmd.runs("epilog", ID="7", USER="alice", GPUS="0,3")
    assert slurmd.jobs == {}


def test_jobs_that_share_a_gpu_come_and_go_each_by_itself(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    slurmd.runs("prolog", ID="77", USER="bob", GPUS="0")
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    assert slurmd.jobs == {"0": [("7", "alice", ""), ("77", "bob", "")]}
    slurmd.runs("epilog", ID="7", GPUS="0")
    assert slurmd.jobs == {"0": [("77", "bob", "")]}


def test_a_job_without_gpus_leaves_nothing(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice")
    assert not slurmd.directory.exists()


def test_nothing_half_written_is_left_behind(slurmd: Slurmd) -> None:
    slurmd.runs("prolog", ID="7", USER="alice", GPUS="0")
    assert sorted(path.name for path in slurmd.directory.iterdir()) == [".lock", "0"]
