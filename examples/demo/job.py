"""The demo's training job: examples/digits_ddp.py on four ranks under torchrun, with its fault behind a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rankscope_exporter.simulation import simulated_uuid

SCRIPT = Path(__file__).resolve().parents[1] / "digits_ddp.py"


class Job:
    """A torchrun job that is watched without a change to its script. Its output goes to `output`."""

    def __init__(self, directory: Path, run: str, run_dir: Path, ranks: int = 4, first_rank: int = 0) -> None:
        self.output = directory / f"{run}.log"
        self._extra_work = directory / "extra-work"
        self._stop = directory / "stop"
        self._ranks = ranks
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # As a scheduler names GPUs; here the simulated ones.
            "CUDA_VISIBLE_DEVICES": ",".join(simulated_uuid(first_rank + rank) for rank in range(ranks)),
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN": run,
            "RANKSCOPE_RUN_DIR": str(run_dir),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *launch: str) -> None:
        """Start it; `launch` are torchrun's options in the place of a single node's."""
        options = launch or ("--standalone",)
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={self._ranks}"]
        command += [str(SCRIPT), "--epochs=1000", f"--extra-work={self._extra_work}", f"--stop={self._stop}"]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)  # noqa: S603 - our own script

    def begin_extra_work(self) -> None:
        """From its next step on, rank 0 does extra work after each."""
        self._extra_work.touch()

    def end_extra_work(self) -> None:
        """Rank 0 behaves again."""
        self._extra_work.unlink(missing_ok=True)

    def finish(self) -> str:
        """Let it end after its epoch; returns what it printed last. Raises RuntimeError if it failed."""
        assert self._process is not None
        self._stop.touch()
        status = self._process.wait(60)
        lines = self.output.read_text(errors="replace").splitlines()
        if status:
            raise RuntimeError(f"the training job ended with status {status}:\n" + "\n".join(lines[-5:]))
        return next((line for line in lines if line.startswith("accuracy")), "")

    def is_running(self) -> bool:
        """Whether torchrun is still there."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it now, with all its ranks, if it still runs."""
        if self.is_running():
            assert self._process is not None
            self._process.terminate()
            self._process.wait(60)
