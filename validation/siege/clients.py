"""Attacks on the exporter's port: each is a generator that does one act, or one handful, and yields."""

from __future__ import annotations

import base64
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, cycle
from types import TracebackType

from validation.fuzz.requests import OPENMETRICS, STATUS, damaged
from validation.siege.target import INSIDER, Seen, Target, any_server

PATIENCE = 5.0  # seconds for one call
MANY = 400  # connections of one attacker: three times as many as the exporter lets in
NEW = 40  # connections an act at the most
ENDLESS = 24 * 1024 * 1024  # bytes after which one is given up: the kernel's buffers of a connection hold some 6 MiB
GUESSES = 40  # at once: more than may wait of one address
START = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /-/release HTTP/1.1\r\nHost: x\r\n"
CHURN = 300  # connections an act, and as many are held: more than the kernel keeps in a queue
LARGE = START + b"X-Long: " + b"a" * 59_000  # a request of 60 kB, but for its end
CHURNED = (LARGE + b"\r\n\r\n", LARGE, (START + b"\r\n") * 8, b"")
ENDLESS_REQUESTS = (
    (b"GET /", b"a" * 65536),
    (START + b"X-Long: ", b"a" * 65536),
    (START, b"a: b\r\n" * 10000),
    (b"", b"\r\n" * 32768),
    (POST + b"Content-Length: 999999999999\r\n\r\n", b"a" * 65536),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10000),
    (b"", b"GET /-/healthy HTTP/1.1\r\n\r\n" * 2500),
)
ODD_ACCEPTS = (
    b"Accept: " + OPENMETRICS,
    b"Accept: application/openmetrics-text;version=1.0.0a\xb2",
    b"Accept: application/openmetrics-text;version=" + b"9" * 5000,
    b"Accept: application/openmetrics-text;version=1.0.0;escaping=values;q=nan",
    b"Accept: text/plain;version=0.0.4;q=-1,*/*;q=1e999",
    b"Accept: ;;=;q=x",
    b"Accept: " + b"," * 5000,
    b"Accept: \xe9",
    b"Accept-Encoding: gzip;q=0,identity;q=0",
    b"Accept-Encoding: gzip;q=x, br, \xff",
    b"Accept-Encoding: " + b"gzip," * 1000,
)


def basic(user: str, password: str) -> bytes:
    """The header line of a password."""
    return b"Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode())


ASK = START + basic(*INSIDER) + b"\r\n"


class Crowd:
    """Connections that are held, each with the same first words; those that the server closes are replaced."""

    def __init__(self, target: Target, seen: Seen, size: int, receive_buffer: int = 0) -> None:
        self._target, self._seen, self._size = target, seen, size
        self._receive_buffer = receive_buffer
        self._poll = select.poll()
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._held.values():
            connection.close()

    def fill(self, first: bytes) -> None:
        """Put new ones in the place of those that are closed, a few at a time."""
        self._drop_closed()
        for _ in range(min(NEW, self._size - len(self._held))):
            try:
                connection = connect(self._target, self._receive_buffer)
                connection.sendall(first)
            except OSError:
                self._seen["not let in"] += 1
                return
            connection.setblocking(False)
            self._held[connection.fileno()] = connection
            self._poll.register(connection, select.POLLRDHUP)
            self._seen["opened"] += 1

    def say(self, words: bytes) -> None:
        """Each sends some more."""
        for connection in self._held.values():
            with suppress(OSError):
                connection.send(words)

    def read(self) -> None:
        """The statuses of those that were answered, which are closed."""
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
    """A connection from the attacker's address, with TLS where the server has it."""
    connection = socket.socket()
    try:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE)
        connection.bind((target.source, 0))
        connection.connect((target.host, target.port))
        return any_server().wrap_socket(connection) if target.tls else connection
    except BaseException:
        connection.close()
        raise


def silent(target: Target, seen: Seen) -> Iterator[None]:
    """Hundreds of connections that say nothing, to use up the exporter's descriptors."""
    with Crowd(target, seen, MANY) as crowd:
        while True:
            crowd.fill(b"")
            yield


def unfinished(target: Target, seen: Seen) -> Iterator[None]:
    """Requests that go on for ever, a byte at a time."""
    with Crowd(target, seen, MANY // 2) as crowd:
        while True:
            crowd.fill(START)
            crowd.say(b"a")
            yield


def unread(target: Target, seen: Seen) -> Iterator[None]:
    """Pages that are asked for, eight times on each connection, and not read; with a password that is right."""
    with Crowd(target, seen, MANY // 4, receive_buffer=4096) as crowd:
        while True:
            crowd.fill((ASK + b"\r\n") * 8)
            yield


def endless(target: Target, seen: Seen) -> Iterator[None]:
    """Requests without an end, as fast as they are taken."""
    for beginning, part in cycle(ENDLESS_REQUESTS):
        sent = 0
        try:
            with connect(target) as connection:
                connection.sendall(beginning)
                while sent < ENDLESS:
                    sent += connection.send(part)
            seen["taken to the end"] += 1
        except OSError:
            seen["cut off"] += 1
        yield


def churn(target: Target, seen: Seen) -> Iterator[None]:
    """New connections as fast as they can be made, with large, half or several requests or none, left after a while."""
    held: deque[socket.socket] = deque()
    try:
        for number in count():
            if connection := _opened(target, CHURNED[number % len(CHURNED)]):
                held.append(connection)
                seen["opened"] += 1
            while len(held) > CHURN:
                held.popleft().close()
            if number % CHURN == CHURN - 1:
                yield
    finally:
        for connection in held:
            connection.close()


def dropped(target: Target, seen: Seen) -> Iterator[None]:
    """Connections that are reset at once, most before they are accepted, with a request of 60 kB or none."""
    for number in count():
        if connection := _opened(target, CHURNED[number % 2 * 3]):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            seen["dropped"] += 1
        if number % CHURN == CHURN - 1:
            yield


def handshakes(target: Target, seen: Seen) -> Iterator[None]:
    """TLS handshakes that are begun, in one piece and in two, and never ended; and some that are, for nothing."""
    hello = client_hello()
    held: deque[socket.socket] = deque()
    try:
        while True:
            for number in range(NEW):
                if connection := _opened(target, hello[: None if number % 2 else 9]):
                    held.append(connection)
                    seen["begun"] += 1
            for connection in [*held][-NEW::2]:
                with suppress(OSError):
                    connection.send(hello[9:])
            if target.tls:
                with suppress(OSError):
                    connect(target).close()
                    seen["ended"] += 1
            while len(held) > MANY // 4:
                held.popleft().close()
            yield
    finally:
        for connection in held:
            connection.close()


def client_hello() -> bytes:
    """The first bytes of a TLS client."""
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def _opened(target: Target, first: bytes) -> socket.socket | None:
    """A connection that waits for nothing, with these first words if they were taken at once."""
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


def guesses(target: Target, seen: Seen) -> Iterator[None]:
    """Wrong passwords of a user that there is, and of one that there is not."""
    numbers = count()
    with Crowd(target, seen, GUESSES) as crowd:
        while True:
            number = next(numbers)
            crowd.read()
            user = ("prometheus", "nobody")[number % 2]
            crowd.fill(START + basic(user, f"guess {number}") + b"\r\n\r\n")
            yield


def odd_accepts(target: Target, seen: Seen) -> Iterator[None]:
    """Pages in every form that can be asked for, and in some that cannot; with a password that is right."""
    for line in cycle(ODD_ACCEPTS):
        with suppress(OSError), connect(target) as connection:
            connection.sendall(ASK + line + b"\r\nConnection: close\r\n\r\n")
            seen[_status(connection)] += 1
            while connection.recv(1 << 20):
                pass
        yield


def damaged_requests(target: Target, seen: Seen) -> Iterator[None]:
    """Requests with bits, lines and lengths that are not as they should be, and TLS where there is none."""
    for number in count():
        with suppress(OSError), connect(target) as connection:
            connection.settimeout(0.02)  # it may well wait for more
            for part in damaged(1, number):
                connection.sendall(part)
            seen[_status(connection)] += 1
        if number % 10 == 9:
            yield


def _status(connection: socket.socket) -> str:
    """Of the answer. Raises BlockingIOError where there is none yet and the connection does not wait."""
    try:
        answer = connection.recv(4096)
    except (ConnectionError, TimeoutError, ssl.SSLEOFError):
        return "no answer"
    except ssl.SSLWantReadError:
        raise BlockingIOError from None
    found = STATUS.match(answer)
    return found[1].decode() if found else "no answer"
