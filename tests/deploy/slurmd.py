"""Runs the prolog and epilog script like slurmd, and reads its files like the exporter."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rankscope_exporter.gpu.allocation.slurm import SlurmJobs

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/gpu_jobs.sh"


class Slurmd:
    """Runs the script, with a shell if one is given, and only slurmd's variables in its environment."""

    def __init__(self, directory: Path, *shell: str) -> None:
        self.directory, self.shell = directory, shell

    def runs(self, context: str, *, visible: str | None = None, is_full: bool = False, **variables: str) -> None:
        """Run the script with these variables of the job, and with `visible` as CUDA_VISIBLE_DEVICES.

        With `is_full`, a write must fail and be reported.
        """
        environment = {"RANKSCOPE_SLURM_DIR": str(self.directory), "SLURM_SCRIPT_CONTEXT": f"{context}_slurmd"}
        environment |= {f"SLURM_JOB_{name}": value for name, value in variables.items()}
        environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        command = [*self.shell, str(SCRIPT)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, cwd=self.directory.parent)
        assert (done.returncode, done.stdout) == (0, b""), "a prolog that fails drains the node"
        assert (done.stderr != b"") is is_full

    @property
    def jobs(self) -> dict[str, list[tuple[str, str, str]]]:
        """The number, user and account of the jobs, by GPU."""
        found = SlurmJobs(self.directory).holders()
        return {gpu: [(job.slurm_job_id, job.user, job.slurm_account) for job in jobs] for gpu, jobs in found.items()}
