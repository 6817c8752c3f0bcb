"""A node for measurements of both exporters: eight simulated GPUs (nvml_simulator), eight live ranks,
and rankscope-exporter and nvitop-exporter, each in its own process.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nvml_simulator import environment, install

from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from rankscope_exporter.simulation import simulated_uuid
from rankscope_exporter.simulation.scenario import Scenario
from testing.servers import free_port as free_port

STEP = 0.1  # seconds
READY_WITHIN = 60.0  # seconds
HEADERS = {"Accept": "text/plain;version=0.0.4;q=0.3,*/*;q=0.1", "Accept-Encoding": "gzip"}  # as from Prometheus


@dataclass
class Exporter:
    """One measured exporter; `busy` matches its busy metric, whose values are `scale` times the ratio."""

    name: str
    command: Callable[[int], list[str]]
    path: str
    busy: re.Pattern[bytes]
    scale: float
    port: int = 0
    pid: int = 0
    connection: http.client.HTTPConnection = field(default_factory=lambda: http.client.HTTPConnection("127.0.0.1"))

    def scrape(self, headers: dict[str, str] | None = None) -> bytes:
        """Return the body of one answer, on a persistent connection."""
        try:
            self.connection.request("GET", self.path, headers=headers or {})
            answer = self.connection.getresponse()
        except http.client.RemoteDisconnected:  # it was idle for too long
            self.connection.close()
            self.connection.request("GET", self.path, headers=headers or {})
            answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise OSError(f"{self.name} answered {answer.status}")
        return body

    def busy_values(self) -> dict[int, float]:
        """Return each GPU's busy metric: seconds so far, or the ratio of the last sample."""
        found = self.busy.findall(self.scrape())
        return {int(gpu): float(value) / self.scale for gpu, value in found}


def exporters() -> list[Exporter]:
    """Return Rankscope's exporter and nvitop-exporter."""

    def nvitop(port: int) -> list[str]:
        return [sys.executable, "-m", "nvitop_exporter", "--hostname=node", f"--port={port}"]

    gauge = re.compile(rb'^gpu_utilization_Percentage\{[^}]*index="(\d+)",[^}]*\} (\S+)$', re.M)
    return [
        ours("rankscope-exporter"),
        Exporter("nvitop-exporter", nvitop, "/metrics", gauge, 100.0),
    ]


def ours(name: str, *flags: str) -> Exporter:
    """Return Rankscope's exporter with these flags."""
    counter = re.compile(rb'^rankscope_gpu_busy_seconds_total\{gpu="(\d+)",[^}]*\} (\S+)$', re.M)

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "rankscope_exporter", f"--web.listen-address=127.0.0.1:{port}", *flags]

    return Exporter(name, command, "/metrics", counter, 1.0)


@dataclass
class Node:
    """The node on which exporters run."""

    start_unix: float
    """The unix time at which the scenario started."""


@contextmanager
def running(
    scenario: Callable[[Sequence[int]], Scenario],
    ranks: int = 0,
    *,
    alone: bool = False,
    more: Sequence[Exporter] = (),
) -> Iterator[tuple[Node, list[Exporter]]]:
    """Run both exporters (or only Rankscope's) and `more` on a scenario that starts now and gets the ranks' pids."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:  # tmpfs, as in production
        directory = Path(name)
        pids = [stack.enter_context(_process(_live, directory, rank)) for rank in range(ranks)]
        node, simulated = Node(time.time()), scenario(pids)
        install(directory, simulated, node.start_unix)
        variables = {**os.environ, **environment(directory), "RANKSCOPE_RUN_DIR": name}
        started = [*(exporters()[:1] if alone else exporters()), *more]
        for exporter in started:
            stack.enter_context(_started(exporter, variables, len(simulated.timelines)))
        yield node, started


@contextmanager
def _started(exporter: Exporter, variables: dict[str, str], gpus: int) -> Iterator[None]:
    exporter.port = free_port()
    with subprocess.Popen(exporter.command(exporter.port), env=variables, stderr=subprocess.DEVNULL) as process:
        try:
            exporter.pid = process.pid
            exporter.connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=30)
            _await_values(exporter, gpus)
            yield
        finally:
            exporter.connection.close()
            process.terminate()


def _await_values(exporter: Exporter, gpus: int) -> None:
    until = time.monotonic() + READY_WITHIN
    while True:
        try:
            if len(exporter.busy_values()) == gpus:
                return
        except (OSError, http.client.HTTPException):
            exporter.connection.close()
        if time.monotonic() > until:
            raise TimeoutError(f"{exporter.name} does not publish {gpus} GPUs")
        time.sleep(0.1)


@contextmanager
def _process(run: Callable[[Path, int], None], directory: Path, rank: int) -> Iterator[int]:
    process = multiprocessing.get_context("fork").Process(target=run, args=(directory, rank), daemon=True)
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.terminate()
        process.join()


def _live(directory: Path, rank: int) -> None:
    """Run a rank that goes through its phases and makes ten steps a second."""
    writer = RankWriter()
    timeline = Timeline(writer)
    writer.publish(directory, f"benchmark.{rank}", _info(rank))
    while True:
        for phase, share in ((layout.DATA_WAIT, 0.1), (layout.FORWARD, 0.3), (layout.BACKWARD, 0.6)):
            opened = timeline.enter(phase)
            time.sleep(STEP * share)
            timeline.leave(opened)
        timeline.step()


def _info(rank: int) -> dict[str, object]:
    info = {"run": "benchmark", "rank": str(rank), "local_rank": str(rank), "world_size": "8", "group": "0-7"}
    info |= {"node": socket.gethostname(), "pid": str(os.getpid()), "uuid": simulated_uuid(rank)}
    return {**info, "backend": "gloo", "torch_version": "2.13.0", "rankscope_version": "0", "phases": []}
