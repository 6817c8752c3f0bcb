"""Our exporter as a process of its own, and what it served, scrape by scrape."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from testing.simulated_node import free_port

READY_WITHIN = 60.0  # seconds
EVERY = 0.5  # seconds between scrapes; the exporter reads its GPUs once a second

Series = tuple[str, frozenset[tuple[str, str]]]

# Imports come first: the machine's Python may lie where nobody else may enter.
AS_NOBODY = """
import os, sys
import anyio._backends._asyncio, encodings.idna, uvicorn.lifespan.on
import uvicorn.loops.uvloop, uvicorn.protocols.http.httptools_impl
import rankscope_exporter.daemon, rankscope_exporter.logs
from rankscope_exporter.__main__ import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.chdir("/")
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Scrape:
    """Everything that was served at a unix time."""

    at: float
    values: Mapping[Series, float]

    def select(self, metric: str, **labels: str) -> dict[Series, float]:
        """The series of a metric with (at least) these labels."""
        return {
            series: value
            for series, value in self.values.items()
            if series[0] == metric and labels.items() <= series[1]
        }


class Exporter:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.pid = process.pid
        self.port = port
        self._process = process
        self._log = log

    def scrape(self) -> Scrape:
        """One answer. Raises OSError."""
        at = time.time()
        families = text_string_to_metric_families(self.body())
        samples = (sample for family in families for sample in family.samples)
        return Scrape(at, {(s.name, frozenset(s.labels.items())): s.value for s in samples})

    def body(self) -> str:
        """What it serves. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def complaints(self) -> list[str]:
        """What it logged beyond the ordinary."""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if "level=info" not in line]

    def await_ready(self) -> None:
        """Raises TimeoutError, with what it said."""
        until = time.monotonic() + READY_WITHIN
        while time.monotonic() < until and self._process.poll() is None:
            if self._is_ready():
                return
            time.sleep(0.1)
        raise TimeoutError(f"the exporter is not ready: {self._log.read_text(errors='replace')[-2000:]}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def running(*flags: str, as_nobody: bool = False) -> Iterator[Exporter]:
    """One that is ready, with these flags, on an empty run directory. Raises TimeoutError."""
    program = ["-c", AS_NOBODY] if as_nobody else ["-m", "rankscope_exporter"]
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        directory.chmod(0o755)
        command = [sys.executable, *program, f"--web.listen-address=127.0.0.1:{port}", f"--run-dir={name}", *flags]
        with (
            (directory / "log").open("wb") as log,
            subprocess.Popen(command, stderr=log, env=environment()) as process,
        ):
            STARTED.append(process)
            try:
                exporter = Exporter(process, port, directory / "log")
                exporter.await_ready()
                yield exporter
            finally:
                _end(process)


def environment() -> dict[str, str]:
    """Ours, and what this process can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:  # stuck in the driver
        process.kill()


STARTED: list[subprocess.Popen[Any]] = []
"""Every process that a part has started."""


def end_started() -> None:
    """Kill what a part that did not end in time has left running: it waits for nothing then, and ends."""
    for process in STARTED:
        if process.poll() is None:
            process.kill()


class Recorder:
    """Scrapes on and on, in a thread."""

    def __init__(self, exporter: Exporter) -> None:
        self.scrapes: list[Scrape] = []
        self.errors: list[str] = []
        self._exporter = exporter
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(15)

    def between(self, start: float, end: float) -> list[Scrape]:
        """The scrapes of that time (unix)."""
        return [scrape for scrape in self.scrapes if start <= scrape.at <= end]

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self._record()

    def _record(self) -> None:
        try:
            self.scrapes.append(self._exporter.scrape())
        except OSError as error:
            self.errors.append(str(error))


def values(scrapes: Sequence[Scrape], metric: str, **labels: str) -> list[float]:
    """A series' values over time; of several series that fit, their sums."""
    found = (scrape.select(metric, **labels) for scrape in scrapes)
    return [sum(series.values()) for series in found if series]
