"""The launcher's side of the training job: start it, change its behavior, signal its ranks, end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankscope_exporter.simulation import simulated_uuid
from testing.job.control import ControlWriter, Progress
from testing.job.device import GLOO
from testing.stack import wait_for

RANKS = int(os.environ.get("RANKS", "4"))
NOTICE = 6  # steps ahead: more than may pass between reading the progress and writing the file
TAKES_EFFECT_WITHIN = 20.0  # seconds
STARTS_WITHIN = 90.0
ENDS_WITHIN = 30.0


class JobError(RuntimeError):
    """The job did not work without a fault. The text has the end of its output."""


class TrainingJob:
    """One torchrun job with the hook, each rank on a simulated GPU."""

    ranks = RANKS
    script = "testing.job"

    def __init__(self, directory: Path, run: str, run_dir: Path, device: str = GLOO, machine: int = 0) -> None:
        """Keep the job's files in `directory`; the simulated GPUs are those of `machine`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.run = run
        self.device, self._machine = device, machine
        self.started = 0.0
        self.progress = Progress(directory / "progress")
        self.output = directory / "output.log"
        self._directory, self._run_dir = directory, run_dir
        self._control = ControlWriter(directory / "control.json")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **common: Any) -> None:
        """Start the job, with this behavior from the first step on."""
        self._control.common = common
        self._control.write(from_step=0)
        self.started = time.time()
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self.command(), env={**os.environ, **self.environment()}, stdout=output, stderr=output
            )

    def command(self) -> list[str]:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, "-m", *torchrun, "-m", self.script, str(self._directory), self.device]

    def environment(self) -> dict[str, str]:
        """Return the job's environment variables in addition to those of this process."""
        return {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(simulated_uuid(rank, self._machine) for rank in range(self.ranks)),
            # The asynchronous device must be installed before the hook, which comes with `import torch`.
            "RANKSCOPE": "1" if self.device == GLOO else "0",
            "RANKSCOPE_RUN": self.run,
            "RANKSCOPE_RUN_DIR": str(self._run_dir),
        }

    def wait_until_training(self) -> None:
        """Wait for some steps of all ranks. Raises JobError."""
        self._wait_for_step(NOTICE, STARTS_WITHIN)

    def change(self, common: dict[str, Any] | None = None, ranks: dict[int, dict[str, Any]] | None = None) -> float:
        """Add this to the current behavior. Return when it took effect, in unix time. Raises JobError."""
        self._control.common |= common or {}
        for rank, behavior in (ranks or {}).items():
            self._control.ranks[rank] = {**self._control.ranks.get(rank, {}), **behavior}
        return self._write()

    def heal(self, **common: Any) -> float:
        """Reset all ranks to this behavior. Return when it took effect, in unix time. Raises JobError."""
        self._control.common, self._control.ranks = common, {}
        return self._write()

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int((self._directory / f"rank-{rank}.pid").read_text())

    def began(self, rank: int) -> float:
        """Return the unix time at which a rank's script began."""
        return float((self._directory / f"rank-{rank}.began").read_text())

    def step(self) -> int:
        """Return the step that rank 0 is in; 0 before the first."""
        return self.progress.read()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def has_succeeded(self) -> bool:
        """Return whether the job has ended without an error."""
        return self._process is not None and self._process.poll() == 0

    def finish(self) -> None:
        """End all ranks normally. Raises JobError."""
        self._control.common = {"stops": True}
        self._write(waits=False)
        if not wait_for(lambda: not self.is_running(), ENDS_WITHIN):
            raise JobError(f"{self.run} does not end normally\n{self.last_output()}")

    def terminate(self) -> None:
        """Send SIGTERM to torchrun, as a scheduler does, then SIGKILL if it does not end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._kill_all()

    def kill(self, rank: int) -> float:
        """Send SIGKILL to one rank. Return the unix time."""
        os.kill(self.pid(rank), signal.SIGKILL)
        return time.time()

    def pin(self, rank: int, cpus: set[int]) -> None:
        """Restrict all threads of a rank to these CPUs."""
        for thread in Path(f"/proc/{self.pid(rank)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)

    def last_output(self) -> str:
        """Return the end of the job's output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-15:])

    def _kill_all(self) -> None:
        assert self._process is not None
        for rank in range(self.ranks):
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(self.pid(rank), signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _write(self, waits: bool = True) -> float:
        from_step = self.step() + NOTICE
        self._control.write(from_step)
        if waits:
            self._wait_for_step(from_step, TAKES_EFFECT_WITHIN)
        return time.time()

    def _wait_for_step(self, step: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if not self.is_running() or time.monotonic() > deadline:
                raise JobError(f"{self.run} does not reach step {step}\n{self.last_output()}")
            time.sleep(0.02)
