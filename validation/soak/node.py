"""One of the two nodes: a job, GPUs, an exporter behind a proxy, a run directory that can be full, and a clock."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from testing.job.control import Behavior
from validation.gauntlet.arena import Arena
from validation.soak.plan import PACE, RUNS
from validation.soak.proxy import Proxy

RUN_DIRECTORY_SIZE = "4m"
CAN_MOUNT = os.geteuid() == 0
"""The full run directory is a file system of its own; without root it is left out."""


class Node(Arena):
    """An arena that can be disturbed. Its stack runs before the job starts."""

    def __init__(self, directory: Path, memory: Path, run: str) -> None:
        self._clock = directory / "clock"
        self._run_dir_mounted = memory / "run"
        healthy: dict[str, Any] = {"forward": Behavior.forward * PACE, "backward": Behavior.backward * PACE}
        self.set_clock(0)
        (state := directory / "state").mkdir()
        exporter = ("validation.soak.exporter", str(self._clock), f"--state-dir={state}")
        super().__init__(directory, memory, run, run, RUNS.index(run), exporter, None, **healthy)
        self.exporter.name = f"exporter of {run}"
        self.proxy = Proxy(self.exporter.url)

    def set_clock(self, ahead: float) -> None:
        """Set how many seconds the exporter's clock is ahead from now on."""
        draft = self._clock.with_suffix(".draft")
        draft.write_text(f"{ahead:+g}")
        draft.rename(self._clock)

    def fill(self, filler: str) -> int:
        """Fill the run directory with a file of that name until no byte is free. Return the file's size."""
        path = self._run_dir_mounted / filler
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        return path.stat().st_size

    def empty(self, filler: str) -> None:
        """Remove the file."""
        (self._run_dir_mounted / filler).unlink()

    def mount(self, started: ExitStack) -> None:
        """Mount a small file system as the run directory, until `started` closes."""
        if CAN_MOUNT:
            _run("mount", "-t", "tmpfs", "-o", f"size={RUN_DIRECTORY_SIZE}", "tmpfs", str(self._run_dir_mounted))
            started.callback(_run, "umount", "--lazy", str(self._run_dir_mounted))


def _run(*command: Any) -> None:
    subprocess.run(command, check=True)
