"""The runner's side of the training job: start it, tell it what to do, signal its ranks, end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from testing.stack import wait_for
from validation.gauntlet.control import Behaviours, Progress
from validation.gauntlet.devices import GLOO

from rankscope_exporter.simulation import simulated_uuid

RANKS = 4
NOTICE = 6  # steps ahead: more than may pass between reading the progress and the file's being there
TAKES_EFFECT_WITHIN = 20.0  # seconds
STARTS_WITHIN = 90.0
ENDS_WITHIN = 30.0


class JobError(RuntimeError):
    """The job did not do what it has to do without any fault; the text has its last words."""


class Training:
    """One torchrun job, each rank on a simulated GPU, watched by the hook as it comes."""

    ranks = RANKS
    script = "validation.gauntlet.job"

    def __init__(self, directory: Path, run: str, run_dir: Path, device: str = GLOO, machine: int = 0) -> None:
        """`directory` is for what ranks are told; `machine` tells simulated GPUs of several apart."""
        directory.mkdir(parents=True)
        self.run = run
        self._device, self._machine = device, machine
        self.started = 0.0
        self._directory, self._run_dir = directory, run_dir
        self._behaviours = Behaviours(directory / "control.json")
        self._progress = Progress(directory / "progress")
        self._output = directory / "output.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **everybody: Any) -> None:
        """Start it, its ranks with this behaviour from the first step on."""
        self._behaviours.everybody = everybody
        self._behaviours.write(from_step=0)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(simulated_uuid(rank, self._machine) for rank in range(self.ranks)),
            # The asynchronous device has to be there before the hook, and the hook comes with `import torch`.
            "RANKSCOPE": "1" if self._device == GLOO else "0",
            "RANKSCOPE_RUN": self.run,
            "RANKSCOPE_RUN_DIR": str(self._run_dir),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += ["-m", self.script, str(self._directory), self._device]
        self.started = time.time()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def wait_until_training(self) -> None:
        """Some steps of all. Raises JobError."""
        self._wait_for_step(NOTICE, STARTS_WITHIN)

    def tell(self, everybody: dict[str, Any] | None = None, ranks: dict[int, dict[str, Any]] | None = None) -> float:
        """Add this to what is told already; returns when it took effect, in unix time. Raises JobError."""
        self._behaviours.everybody |= everybody or {}
        for rank, behaviour in (ranks or {}).items():
            self._behaviours.ranks[rank] = {**self._behaviours.ranks.get(rank, {}), **behaviour}
        return self._write()

    def heal(self, **everybody: Any) -> float:
        """Everybody behaves again, or so; returns from when on. Raises JobError."""
        self._behaviours.everybody, self._behaviours.ranks = everybody, {}
        return self._write()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return int((self._directory / f"rank-{rank}.pid").read_text())

    def step(self) -> int:
        """The one that rank 0 is in; 0 before the first."""
        return self._progress.read()

    def is_running(self) -> bool:
        """Whether torchrun is still there."""
        return self._process is not None and self._process.poll() is None

    def finish(self) -> None:
        """Let all ranks end in order. Raises JobError."""
        self._behaviours.everybody = {"stops": True}
        self._write(waits=False)
        if not wait_for(lambda: not self.is_running(), ENDS_WITHIN):
            raise JobError(f"{self.run} did not end when told to\n{self._last_words()}")

    def terminate(self) -> None:
        """SIGTERM to torchrun, as a scheduler does, and by force if it does not go."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._kill_all()

    def kill(self, rank: int) -> float:
        """SIGKILL to one rank; returns when."""
        os.kill(self.pid(rank), signal.SIGKILL)
        return time.time()

    def pin(self, rank: int, processors: set[int]) -> None:
        """All threads of a rank may run on these processors only."""
        for thread in Path(f"/proc/{self.pid(rank)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), processors)

    def _kill_all(self) -> None:
        assert self._process is not None
        for rank in range(self.ranks):
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(self.pid(rank), signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _write(self, waits: bool = True) -> float:
        from_step = self._progress.read() + NOTICE
        self._behaviours.write(from_step)
        if waits:
            self._wait_for_step(from_step, TAKES_EFFECT_WITHIN)
        return time.time()

    def _wait_for_step(self, step: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._progress.read() < step:
            if not self.is_running() or time.monotonic() > deadline:
                raise JobError(f"{self.run} does not reach step {step}\n{self._last_words()}")
            time.sleep(0.02)

    def _last_words(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])
