"""Measure an analyzer of many targets, most of them without a run that spans nodes, and half of them dead.

The analyzer is a process that asks real HTTP servers. One run of 128 simulated ranks is on 16 nodes, in steps of 0.2 s
and in real time; the other living targets have no ranks. Half of the dead targets refuse connections, and half accept
them and never answer. All of 127.0.0.0/8 is this machine, so that each target has an address of its own. A target
without ranks is asked each 50 s: a run that begins on such nodes may be known only then.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from testing import report, servers
from testing.live_nodes import LOOK_INTERVAL, Look, look
from testing.processes import MEBIBYTE, cpu_seconds, resident_bytes
from testing.readings import SLOW
from testing.split_training import SteppingTraining, answer_of

from rankscope_exporter.node_facts.recorder import Part
from rankscope_exporter.node_facts.wire import MOMENTS_LIMIT

NODES, RANKS_PER_NODE = 16, 8
DEAD, SILENT = 0.5, 0.25
"""Ratio of the targets that are dead, and of those that accept a connection and never answer."""
KEPT_MOMENTS = 90
KNOWN_WITHIN, SETTLED, MEASURED, FOUND_WITHIN = 180.0, 120.0, 60.0, 60.0
"""Seconds for the first verdict, until each target was asked, for the CPU time, and for the finding."""
SECOND, BEHIND_LIMIT = 1.0, 5.0
"""Seconds of a moment, and by which the simulation may be late."""


class ManyTargets(NamedTuple):
    """The cost with many targets."""

    targets: int
    up: float
    """The number of targets that answer."""
    known_after: float
    """Seconds from the start to the run's first verdict."""
    cores: float
    """CPU seconds per second."""
    megabytes: float
    """The peak."""
    lag: float
    """The most seconds between now and the last judged second."""
    found_after: float | None


class _Facts:
    """The moments of each node of the run in real time."""

    def __init__(self) -> None:
        self.training = SteppingTraining(NODES * RANKS_PER_NODE)
        self.is_slow = False
        self._ahead = self.training.now - time.monotonic()
        self._kept: list[deque[tuple[float, Part]]] = [deque(maxlen=KEPT_MOMENTS) for _ in range(NODES)]

    async def train(self) -> None:
        """Train as fast as time passes."""
        while True:
            behind = time.monotonic() + self._ahead - (self.training.now + SECOND)
            assert behind < BEHIND_LIMIT, "the simulation is too slow for this machine"
            await asyncio.sleep(max(0.0, -behind))
            for at, readings in self.training.train(SECOND, *((SLOW,) if self.is_slow else ())):
                for node, kept in enumerate(self._kept):
                    ranks = [readings[node * RANKS_PER_NODE + rank] for rank in range(RANKS_PER_NODE)]
                    kept.append((at, self.training.encoded(at, ranks)))

    def answer(self, node: int, after: float | None) -> bytes:
        """Return the compressed answer of a node; of one without ranks if the run has no such node."""
        now = time.monotonic() + self._ahead
        if node >= NODES:
            return answer_of(node, now, [])
        kept = self._kept[node]
        found = [*kept][-1:] if after is None else [one for one in kept if one[0] > after][:MOMENTS_LIMIT]
        return answer_of(node, now, [moment for _, moment in found])


def address(number: int) -> str:
    """Return the IP address of a target."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


async def _answer(facts: _Facts, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = await reader.readuntil(b"\r\n\r\n")
    query = parse_qs(urlsplit(request.split()[1].decode()).query)
    host = writer.get_extra_info("sockname")[0].split(".")
    after = float(query["after"][0]) if "after" in query else None
    body = facts.answer(int(host[2]) * 250 + int(host[3]) - 1, after)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    writer.close()


async def _never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def _listening(port: int) -> socket.socket:
    """Return a socket with all addresses of the loopback device."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    listening.bind(("", port))
    return listening


async def _serve(port: int, silent_port: int) -> None:
    facts = _Facts()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, partial(setattr, facts, "is_slow", True))
    async with (
        await asyncio.start_server(partial(_answer, facts), sock=_listening(port), backlog=1024),
        await asyncio.start_server(_never_answer, sock=_listening(silent_port), backlog=1024),
    ):
        await facts.train()


@contextmanager
def _served(port: int, silent_port: int) -> Iterator[int]:
    """Serve the targets in another process. Yield its pid: SIGUSR1 makes a rank slow."""
    process = multiprocessing.get_context("fork").Process(
        target=lambda: asyncio.run(_serve(port, silent_port)), daemon=True
    )
    process.start()
    assert process.pid
    try:
        yield process.pid
        assert process.is_alive(), "the targets have ended"
    finally:
        process.kill()
        process.join()


def _groups(targets: int, port: int, silent_port: int, dead_port: int) -> list[Mapping[str, Any]]:
    """Return the file_sd document of all targets."""
    silent, dead = int(SILENT * targets), int(DEAD * targets)
    ports = [silent_port] * silent + [dead_port] * (dead - silent)
    ports = [port] * (targets - dead) + ports
    return [{"targets": [f"{address(number)}:{one}" for number, one in enumerate(ports)]}]


def measure(targets: int, directory: Path) -> ManyTargets:
    """Return the cost with so many targets."""
    port, silent_port, dead_port = (servers.free_port() for _ in range(3))
    path = directory / "targets.json"
    path.write_text(json.dumps(_groups(targets, port, silent_port, dead_port)))
    analyzer = servers.analyzer(directory, [str(path)])
    with _served(port, silent_port) as served:
        analyzer.start()
        try:
            return _measure(targets, analyzer, served)
        finally:
            analyzer.stop()


def _measure(targets: int, analyzer: servers.Server, served: int) -> ManyTargets:
    assert analyzer.pid
    known_after = _seconds_until(lambda: look(analyzer.url).lost, KNOWN_WITHIN)
    assert known_after is not None, "the run is not judged"
    time.sleep(max(0.0, SETTLED - known_after))
    began, spent, looks = time.monotonic(), cpu_seconds(analyzer.pid), list[Look]()
    while time.monotonic() < began + MEASURED:
        time.sleep(LOOK_INTERVAL)
        looks.append(look(analyzer.url))
    cores = (cpu_seconds(analyzer.pid) - spent) / (time.monotonic() - began)
    assert not any(one.since for one in looks), "a finding in a healthy run"
    os.kill(served, signal.SIGUSR1)
    found = _seconds_until(lambda: look(analyzer.url).since, FOUND_WITHIN)
    peak = resident_bytes(analyzer.pid, "VmHWM") / MEBIBYTE
    return ManyTargets(targets, looks[-1].up, known_after, cores, peak, max(one.lag for one in looks), found)


def _seconds_until(condition: Callable[[], object], limit: float) -> float | None:
    """Return the seconds until the condition holds; None if it does not within the limit."""
    began = time.monotonic()
    while time.monotonic() < began + limit:
        if condition():
            return time.monotonic() - began
        time.sleep(LOOK_INTERVAL)
    return None


def page(cost: ManyTargets) -> report.Report:
    """Return the report."""
    rows = [
        ("targets", cost.targets),
        ("of these answer", f"{cost.up:.0f}"),
        ("CPU time of the analyzer", f"{cost.cores:.1%} of a core"),
        ("peak of its resident memory", f"{cost.megabytes:.0f} MiB"),
        ("first verdict on the run after the start", f"{cost.known_after:.1f} s"),
        ("age of the last judged second, at most", f"{cost.lag:.1f} s"),
        ("slow rank found after", "not found" if cost.found_after is None else f"{cost.found_after:.1f} s"),
    ]
    table, title = report.table(("what", "measured"), rows), "An analyzer of many targets"
    return report.Report("analyzer_targets", title, __doc__, "none", [table], cost._asdict())
