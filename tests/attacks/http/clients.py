"""Misbehaving clients, and one that behaves: a scrape. Only on loopback."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client.core import Metric
from tests.exporter.web.conftest import READY, running

from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.node_facts.recorder import NodeFacts
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.web.app import create_app

REQUEST = b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n"
TIMEOUT = 40  # seconds


class Large:
    """A collector whose page has `size` bytes. `reads` counts the collections; each calls `before` first."""

    name, help = "large", ""

    def __init__(self, size: int = 0, before: Callable[[], None] = lambda: None) -> None:
        self.reads = 0
        self._size = size
        self._before = before

    def collect(self) -> Iterable[Metric]:
        self._before()
        self.reads += 1
        return [Declaration("gauge", "rankscope_large", "Large.", ("text",)).family({"x" * self._size: self.reads})]


@contextmanager
def server(
    *collectors: Large,
    web_config: Path | None = None,
    facts: NodeFacts | None = None,
    reporter: Reporter | None = None,
    stacks_of: Callable[[], Scan | None] | None = None,
) -> Iterator[tuple[int, int]]:
    """Run the exporter's server in this process; yield its port on 127.0.0.1, and on ::1, another address."""
    app = create_app(Scrape(collectors), READY, reporter, facts or NodeFacts("node-a", "boot"), stacks_of=stacks_of)
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server((host, 0), family=family, backlog=128))
            for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))
        ]
        stack.enter_context(running(app, web_config, *listeners))
        yield listeners[0].getsockname()[1], listeners[1].getsockname()[1]


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Open a new connection."""
    return socket.create_connection((host, port), timeout=TIMEOUT)


def request(port: int, path: str = "/metrics", *, host: str = "127.0.0.1", **headers: str) -> socket.socket:
    """Send a request on a new connection; return the connection."""
    connection = connect(port, host)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(REQUEST % (path.encode(), lines.encode()))
    return connection


def scrape(port: int, path: str = "/metrics", *, host: str = "127.0.0.1", **headers: str) -> int:
    """Send a request on a new connection; return the status of its response, 0 if there is none."""
    try:
        with request(port, path, host=host, **{"Connection": "close", **headers}) as connection:
            return status(read_all(connection))
    except OSError:
        return 0


def status(response: bytes) -> int:
    """Return the status in the first line of a response, 0 if there is none."""
    line = response.split(b"\r\n")[0].split(b" ")
    return int(line[1]) if len(line) > 1 else 0


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection. Raises TimeoutError if it does neither."""
    parts = []
    try:
        while part := connection.recv(1 << 20):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def flood(connection: socket.socket, part: bytes, limit: int) -> int:
    """Send `part` repeatedly; return how many bytes were sent before the server closed the connection."""
    sent = 0
    try:
        while sent < limit:
            sent += connection.send(part)
    except (ConnectionError, ssl.SSLError):
        pass
    return sent


def find_reset(connections: Sequence[socket.socket], seconds: float = 0.0) -> list[socket.socket]:
    """Return the connections that the server has reset, without reading from any. Wait up to `seconds` for one."""
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, 0)  # errors are always reported
    return [by_number[number] for number, event in poll.poll(seconds * 1000) if event & select.POLLERR]
