"""The demo's training job: examples/digits_ddp.py on four ranks under torchrun; a file switches its fault on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rankscope_exporter.simulation import simulated_uuid

SCRIPT = Path(__file__).resolve().parents[1] / "digits_ddp.py"


class Job:
    """A torchrun job that is monitored without a change to its script. Its output goes to `output`."""

    def __init__(self, directory: Path, run: str, run_dir: Path, ranks: int = 4, first_rank: int = 0) -> None:
        self.output = directory / f"{run}.log"
        self._extra_work = directory / "extra-work"
        self._stop = directory / "stop"
        self._ranks = ranks
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # The names of the simulated GPUs, as from a scheduler.
            "CUDA_VISIBLE_DEVICES": ",".join(simulated_uuid(first_rank + rank) for rank in range(ranks)),
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN": run,
            "RANKSCOPE_RUN_DIR": str(run_dir),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *launch: str) -> None:
        """Start the job; `launch` are torchrun's options instead of those for a single node."""
        options = launch or ("--standalone",)
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={self._ranks}"]
        command += [str(SCRIPT), "--epochs=1000", f"--extra-work={self._extra_work}", f"--stop={self._stop}"]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)  # noqa: S603 - our own script

    def begin_extra_work(self) -> None:
        """Make rank 0 do extra work after each step, from its next step on."""
        self._extra_work.touch()

    def end_extra_work(self) -> None:
        """End the extra work of rank 0."""
        self._extra_work.unlink(missing_ok=True)

    def finish(self) -> str:
        """End the job after its epoch. Return its accuracy line. Raises RuntimeError if it failed."""
        assert self._process is not None
        self._stop.touch()
        status = self._process.wait(60)
        lines = self.output.read_text(errors="replace").splitlines()
        if status:
            raise RuntimeError(f"the training job ended with status {status}:\n" + "\n".join(lines[-5:]))
        return next((line for line in lines if line.startswith("accuracy")), "")

    def is_running(self) -> bool:
        """Return whether torchrun runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the job now, with all its ranks, if it still runs."""
        if self.is_running():
            assert self._process is not None
            self._process.terminate()
            self._process.wait(60)
