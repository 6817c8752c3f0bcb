"""Attacks on the exporter's port: each is a generator that does one or several acts, and yields."""

from __future__ import annotations

import base64
import select
import socket
import ssl
import struct
from collections.abc import Generator
from contextlib import suppress
from itertools import count, cycle
from types import TracebackType

from validation.fuzz.requests import ODD_VALUES, STATUS, damaged
from validation.siege.target import INSIDER, Held, Seen, Target, any_server

from rankscope_exporter.node_facts.wire import ANALYZER

TIMEOUT = 5.0  # seconds for one call
MANY = 400  # connections of one attacker: three times the exporter's limit
NEW = 40  # most connections an act
ENDLESS_BYTES = 24 * 1024 * 1024  # after which one is abandoned: the kernel buffers some 6 MiB a connection
GUESSES = 40  # at once: more than the limit for one address
START = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /-/release HTTP/1.1\r\nHost: x\r\n"
PAGES, LOOPS = (b"/", b"/-/healthy", b"/-/ready", b"/none"), 20
FACTS = tuple(b"/api/v1/facts" + cursor for cursor in (b"", b"?after=0", b"?after=-1e999", b"?after=nan", b"?after=x"))
CHURN = 300  # connections an act, and held: more than the kernel's queue
LARGE = START + b"X-Long: " + b"a" * 30_000  # a request of 30 kB without its end
CHURNED = (LARGE + b"\r\n\r\n", LARGE, (START + b"\r\n") * 8, b"")
ENDLESS = {
    "line": (b"GET /", b"a" * 65536),
    "header": (START + b"X-Long: ", b"a" * 65536),
    "name": (START, b"a" * 65536),
    "headers": (START, b"a: b\r\n" * 10000),
    "empty lines": (b"", b"\r\n" * 32768),
    "body": (POST + b"Content-Length: 999999999999\r\n\r\n", b"a" * 65536),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10000),
    "chunk extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 65536),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10000),
    "pipelined requests": (b"", b"GET /-/healthy HTTP/1.1\r\n\r\n" * 2500),
}
"""Requests without an end: how each begins, and the part that follows again and again."""
ODD_ACCEPTS = tuple(b"%s: %s" % (name, value) for name in (b"Accept", b"Accept-Encoding") for value in ODD_VALUES[name])


def basic(user: str, password: str) -> bytes:
    """Return the header line of a password."""
    return b"Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode())


ASK = START + basic(*INSIDER) + b"\r\n"


class HeldConnections:
    """Connections that are held, each with the same first bytes; those that the server closes are replaced."""

    def __init__(self, target: Target, seen: Seen, size: int, receive_buffer: int = 0) -> None:
        self._target, self._seen, self._size = target, seen, size
        self._receive_buffer = receive_buffer
        self._poll = select.poll()
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> HeldConnections:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._held.values():
            connection.close()

    def fill(self, first: bytes) -> None:
        """Replace connections that were closed, a few at a time."""
        self._drop_closed()
        for _ in range(min(NEW, self._size - len(self._held))):
            try:
                connection = connect(self._target, self._receive_buffer)
                connection.sendall(first)
            except OSError:
                self._seen["refused"] += 1
                return
            connection.setblocking(False)
            self._held[connection.fileno()] = connection
            self._poll.register(connection, select.POLLRDHUP)
            self._seen["opened"] += 1

    def send(self, data: bytes) -> None:
        """Send more bytes on each connection."""
        for connection in self._held.values():
            with suppress(OSError):
                connection.send(data)

    def read(self) -> None:
        """Count the statuses of answered connections, and close them."""
        for number, connection in [*self._held.items()]:
            with suppress(BlockingIOError):
                self._seen[_status(connection)] += 1
                self._drop(number)

    def _drop_closed(self) -> None:
        for number, _ in self._poll.poll(0):
            self._drop(number)
            self._seen["closed by the server"] += 1

    def _drop(self, number: int) -> None:
        self._poll.unregister(number)
        self._held.pop(number).close()


def connect(target: Target, receive_buffer: int = 0) -> socket.socket:
    """Connect from the attacker's address, with TLS if the server has it."""
    connection = socket.socket()
    try:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(TIMEOUT)
        connection.bind((target.source, 0))
        connection.connect((target.host, target.port))
        return any_server().wrap_socket(connection) if target.tls else connection
    except BaseException:
        connection.close()
        raise


def silent(target: Target, seen: Seen) -> Generator[None]:
    """Open hundreds of connections that send nothing, to use up the exporter's descriptors."""
    with HeldConnections(target, seen, MANY) as held:
        while True:
            held.fill(b"")
            yield


def unfinished(target: Target, seen: Seen) -> Generator[None]:
    """Send requests without an end, a byte at a time."""
    with HeldConnections(target, seen, MANY // 2) as held:
        while True:
            held.fill(START)
            held.send(b"a")
            yield


def unread(target: Target, seen: Seen) -> Generator[None]:
    """Request pages, eight times on each connection, and do not read them; the password is right."""
    with HeldConnections(target, seen, MANY // 4, receive_buffer=4096) as held:
        while True:
            held.fill((ASK + b"\r\n") * 8)
            yield


def endless(target: Target, seen: Seen) -> Generator[None]:
    """Send requests without an end, as fast as they are read."""
    for start, part in cycle(ENDLESS.values()):
        sent = 0
        try:
            with connect(target) as connection:
                connection.sendall(start)
                while sent < ENDLESS_BYTES:
                    sent += connection.send(part)
            seen["read to the end"] += 1
        except OSError:
            seen["cut off"] += 1
        yield


def churn(target: Target, seen: Seen) -> Generator[None]:
    """Open connections as fast as possible, with large, half, several or no requests, and close them after a while."""
    with Held[socket.socket](socket.socket.close, CHURN) as held:
        for number in count():
            if connection := _open_connection(target, CHURNED[number % len(CHURNED)]):
                held.hold(connection)
                seen["opened"] += 1
            if number % CHURN == CHURN - 1:
                yield


def dropped(target: Target, seen: Seen) -> Generator[None]:
    """Open connections and reset them, most before they are accepted, with a request of 30 kB or none."""
    for number in count():
        if connection := _open_connection(target, CHURNED[number % 2 * 3]):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            seen["dropped"] += 1
        if number % CHURN == CHURN - 1:
            yield


def handshakes(target: Target, seen: Seen) -> Generator[None]:
    """Start TLS handshakes, in one piece and in two, and never finish them; finish some without a request."""
    hello = client_hello()
    with Held[socket.socket](socket.socket.close, MANY // 4) as held:
        while True:
            for number in range(NEW):
                if connection := _open_connection(target, hello[: None if number % 2 else 9]):
                    held.hold(connection)
                    seen["begun"] += 1
            for connection in [*held][-NEW::2]:
                with suppress(OSError):
                    connection.send(hello[9:])
            if target.tls:
                with suppress(OSError):
                    connect(target).close()
                    seen["ended"] += 1
            yield


def client_hello() -> bytes:
    """Return the first bytes of a TLS client."""
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def _open_connection(target: Target, first: bytes) -> socket.socket | None:
    """Return a connection that never blocks; it sends these bytes if the kernel takes them at once."""
    connection = socket.socket()
    connection.setblocking(False)
    try:
        connection.bind((target.source, 0))
        with suppress(BlockingIOError):
            connection.connect((target.host, target.port))
        with suppress(BlockingIOError, BrokenPipeError):
            connection.send(first)
    except OSError:
        connection.close()
        return None
    return connection


def guesses(target: Target, seen: Seen) -> Generator[None]:
    """Send wrong passwords of an existing user, and of one that does not exist."""
    numbers = count()
    with HeldConnections(target, seen, GUESSES) as held:
        while True:
            number = next(numbers)
            held.read()
            user = ("prometheus", "unknown")[number % 2]
            held.fill(START + basic(user, f"guess {number}") + b"\r\n\r\n")
            yield


def odd_accepts(target: Target, seen: Seen) -> Generator[None]:
    """Request pages in every supported form, and in unsupported ones; the password is right."""
    for line in cycle(ODD_ACCEPTS):
        with suppress(OSError), connect(target) as connection:
            connection.sendall(ASK + line + b"\r\nConnection: close\r\n\r\n")
            seen[_status(connection)] += 1
            while connection.recv(1 << 20):
                pass
        yield


def pages(target: Target, seen: Seen) -> Generator[None]:
    """Request the status page and others in a loop, on several connections; the password is right."""
    with HeldConnections(target, seen, LOOPS) as held:
        for path in cycle(PAGES):
            held.read()
            held.fill(ASK.replace(b"/metrics", path) + b"Connection: close\r\n\r\n")
            yield


def facts(target: Target, seen: Seen) -> Generator[None]:
    """Request the facts for an analyzer with any cursor and as any analyzer, and read only half of the answers."""
    numbers = count()
    with HeldConnections(target, seen, LOOPS) as read, HeldConnections(target, seen, LOOPS) as unread:
        while True:
            number = next(numbers)
            path, name = FACTS[number % len(FACTS)], f"{ANALYZER}: forged-{number}:1\r\n".encode()
            asked = ASK.replace(b"/metrics", path) + name + b"Accept-Encoding: gzip\r\n"
            read.read()
            read.fill(asked + b"Connection: close\r\n\r\n")
            unread.fill((asked + b"\r\n") * 8)
            yield


def damaged_requests(target: Target, seen: Seen) -> Generator[None]:
    """Send requests with damaged bits, lines and lengths, and TLS to a plain port."""
    for number in count():
        with suppress(OSError), connect(target) as connection:
            connection.settimeout(0.02)  # it may well wait for more
            for part in damaged(1, number):
                connection.sendall(part)
            seen[_status(connection)] += 1
        if number % 10 == 9:
            yield


def _status(connection: socket.socket) -> str:
    """Return the status of the answer. Raises BlockingIOError if there is none yet and the connection does not wait."""
    try:
        answer = connection.recv(4096)
    except (ConnectionError, TimeoutError, ssl.SSLEOFError):
        return "no answer"
    except ssl.SSLWantReadError:
        raise BlockingIOError from None
    found = STATUS.match(answer)
    return found[1].decode() if found else "no answer"
