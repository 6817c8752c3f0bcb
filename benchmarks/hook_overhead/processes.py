"""Start a training process, run blocks of steps in it, and measure its resources from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.hook_overhead.child import ADDRESS
from testing.processes import MEBIBYTE, resident_bytes

CHILD = Path(__file__).with_name("child.py")
STARTS_WITHIN = 120  # seconds until a process trains


class Child:
    """One contender's training process."""

    def __init__(self, training: str, contender: str, directory: Path) -> None:
        address = str(directory / "socket")
        environment = {**os.environ, ADDRESS: address, "RANKSCOPE_RUN_DIR": str(directory), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(CHILD), training, contender]
        if contender == "traceml":
            traceml = Path(sys.executable).with_name("traceml")
            command = [str(traceml), "run", str(CHILD), "--args", training, contender]
        output_path = directory / "output"
        with socket.socket(socket.AF_UNIX) as listener, output_path.open("wb") as output:
            listener.bind(address)
            listener.listen()
            listener.settimeout(STARTS_WITHIN)
            began = time.perf_counter()
            streams: Any = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, env=environment, cwd=directory, **streams)
            try:
                self._driver = Connection(listener.accept()[0].detach())
            except TimeoutError:
                raise RuntimeError(f"{' '.join(command)} did not start:\n{output_path.read_text()}") from None
            self.start = self._driver.recv()["start"]
            self.ready = time.perf_counter() - began
        self.last: dict[str, Any] = {}

    def run(self, steps: int) -> tuple[float, float]:
        """Train for `steps` steps. Return the training thread's wall (without sleep) and CPU seconds a step."""
        self._driver.send(steps)
        self.last = self._driver.recv()
        wall, cpu = self.last["seconds"]
        return wall, cpu

    def processes(self) -> list[int]:
        """Return the pids of the process and of all its descendants."""
        parents = dict(_parents())
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def end(self) -> float:
        """End the process. Return the seconds that it took."""
        began = time.perf_counter()
        self._driver.send(0)
        self._driver.close()
        self._process.wait(timeout=60)
        return time.perf_counter() - began


@contextmanager
def child(training: str, contender: str) -> Iterator[Child]:
    """Start a training process in its own directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Child(training, contender, Path(directory))


def resident_mib(pids: list[int]) -> float:
    """Return the resident memory of processes (MiB)."""
    return sum(map(resident_bytes, pids)) / MEBIBYTE


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the pid and the parent's pid of each process of the machine."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            yield int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])
