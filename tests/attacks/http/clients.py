"""Clients that do not behave, and the one that does: a scrape. Loopback only."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from tests.exporter.web.conftest import READY, running

from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.web.app import create_app

ASK = b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n"
PATIENCE = 40  # seconds: a test that waits as long has failed


class Large:
    """A collector whose page has so many bytes; `looks` counts how often it was looked at, each after `before`."""

    name, help = "large", ""

    def __init__(self, size: int = 0, before: Callable[[], None] = lambda: None) -> None:
        self.looks = 0
        self._size = size
        self._before = before

    def collect(self) -> Iterable[Metric]:
        self._before()
        self.looks += 1
        family = GaugeMetricFamily("rankscope_large", "Large.", labels=["text"])
        family.add_metric(["x" * self._size], self.looks)
        return [family]


@contextmanager
def server(*collectors: Large, web_config: Path | None = None) -> Iterator[tuple[int, int]]:
    """The exporter's server in this process; the value is its port on 127.0.0.1, and on ::1, another address."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server((host, 0), family=family, backlog=128))
            for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))
        ]
        stack.enter_context(running(create_app(Scrape(collectors), READY), web_config, *listeners))
        yield listeners[0].getsockname()[1], listeners[1].getsockname()[1]


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A connection of its own."""
    return socket.create_connection((host, port), timeout=PATIENCE)


def ask(port: int, path: str = "/metrics", *, host: str = "127.0.0.1", **headers: str) -> socket.socket:
    """A connection on which a request has been sent."""
    connection = connect(port, host)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(ASK % (path.encode(), lines.encode()))
    return connection


def scrape(port: int, path: str = "/metrics", *, host: str = "127.0.0.1", **headers: str) -> int:
    """The status of a request of its own, 0 if there is none."""
    try:
        with ask(port, path, host=host, **{"Connection": "close", **headers}) as connection:
            return status(everything(connection))
    except OSError:
        return 0


def status(answer: bytes) -> int:
    """The status in the first line of an answer; 0 where there is none."""
    line = answer.split(b"\r\n")[0].split(b" ")
    return int(line[1]) if len(line) > 1 else 0


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes, be it by a reset. Raises TimeoutError where it does not close."""
    parts = []
    try:
        while part := connection.recv(1 << 20):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def flood(connection: socket.socket, part: bytes, limit: int) -> int:
    """Send this again and again; how many bytes were taken before the server closed."""
    sent = 0
    try:
        while sent < limit:
            sent += connection.send(part)
    except (ConnectionError, ssl.SSLError):
        pass
    return sent


def reset(connections: Sequence[socket.socket], seconds: float = 0.0) -> list[socket.socket]:
    """Those that the server has reset, without reading from any; waits so long for one."""
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, 0)  # errors are told always
    return [by_number[number] for number, event in poll.poll(seconds * 1000) if event & select.POLLERR]
