"""Check whether any request stops the server or leaves a traceback.

    python -m validation.fuzz.requests --requests 100000 --save

Requests of a Prometheus, a browser and an operator's script are mutated at random: bits, methods, paths, headers,
lengths, chunks, line ends, several in a row; some are sent in pieces, some end early. The server is the real one, with
a password, on a port of the loopback interface. After each batch a valid scrape must be answered, the log must have no
error, and no answer the status 500. Request N depends only on the seed and N: `--first N --requests 1` repeats a
failure.

With `--save` the next call continues where the last one ended.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import re
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import uvicorn
import yaml
from validation.fuzz import fuzzing
from validation.fuzz.fuzzing import FuzzError

from rankscope_exporter.daemon import server_configuration
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.config_file import WebConfigFile

BOUND = "no traceback, no status 500, and a valid scrape after each batch"
BATCH = 50  # at once: below the server's limit, so that none closes another
UNANSWERED = 0.02  # seconds after which the client gives up on a request that waits for more
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
PASSWORD = b"Basic " + base64.b64encode(b"fuzz:right")
OPENMETRICS = b"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5"
METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"get", b"", b"G\0T")
PATHS = (
    *(b"/metrics", b"/", b"/-/healthy", b"/-/ready", b"/-/release?seconds=60", b"/-/resume", b"/nothing"),
    *(b"*", b"", b"//", b"/%", b"/%00", b"/%ff%fe", b"/metrics%2f..", b"/../../etc/passwd"),
    *(b"/\xff\xfe", b"/a?%zz=&;#"),
    *(b"http://other/metrics", b"http://[::1", b"other:443", b"/-/release?seconds=1e999", b"/" + b"a" * 5000),
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"HTTP/1.", b"", b"ICY")
ODD_VALUES = {
    b"Transfer-Encoding": (b"chunked", b"gzip, chunked", b"chunked, chunked", b"x", b"\x0bchunked"),
    b"Content-Length": (b"0", b"5", b"-1", b"+5", b"5, 5", b"99999999999999999999", b"0x5", b""),
    b"Connection": (b"close", b"keep-alive", b"upgrade", b"close, upgrade", b",,,", b"\xff"),
    b"Upgrade": (b"websocket", b"h2c", b""),
    b"Expect": (b"100-continue", b"200-ok"),
    b"Accept": (
        *(OPENMETRICS, b"text/plain;version=" + b"9" * 5000, b"text/plain;version=0.0.4;q=-1,*/*;q=1e999"),
        *(b"application/openmetrics-text;version=1.0.0;escaping=values;q=nan", b"," * 5000, b";;=;q=x", b"\xe9"),
        *(
            b"application/openmetrics-text;version=" + one
            for one in (b"1.0.0a\xb2", b"99", b"-1", b"1..0", b"9" * 5000)
        ),
    ),
    b"Accept-Encoding": (
        *(b"gzip", b"gzip;q=0", b"gzip;q=0,identity;q=0", b"gzip;q=-1,br", b"gzip;q=x, br, \xff", b"\xff"),
        *(b"," * 5000, b"gzip," * 1000),
    ),
    b"Authorization": (b"", b"Basic", b"Basic !!!", b"Basic Og==", b"Bearer x", b"Basic " + b"QQ" * 9),
    b"Host": (b"", b"a b", b"[::1", b"\xff", b"a" * 5000),
}
ODD_HEADERS = (
    *((name, value) for name, values in ODD_VALUES.items() for value in values),
    *((b"X-Forwarded-For", b"127.0.0.1"), (b"X-Forwarded-Proto", b"ftp"), (b"Origin", b"null"), (b"", b"x")),
    *((b"a b", b"x"), (b"X" * 5000, b"x"), (b"X", b"x" * 30_000), (b"X", b"a\r\n folded"), (b"X", b"\0")),
    (b"HTTP2-Settings", b"AAMAAABk"),
)
BODIES = (
    *(b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n"),
    *(b"fffffffffffffffff\r\n", b"-1\r\n", b"a" * 5000),
)


def damaged(seed: int, number: int) -> list[bytes]:
    """Return the parts in which request `number` is sent: a valid one with up to four mutations, or several."""
    choose = random.Random(f"{seed}/{number}")
    data = b"".join(_request(choose) for _ in range(choose.choice((1, 1, 1, 1, 1, 2, 3, 12))))
    for mutate in choose.choices(MUTATIONS, k=choose.choice((0, 0, 0, 1, 1, 2, 3))):
        data = mutate(choose, data)
    cuts = sorted(choose.randrange(len(data) + 1) for _ in range(choose.choice((0, 0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


def _request(choose: random.Random) -> bytes:
    method, path, version = b"GET", choose.choice(PATHS[:7]), b"HTTP/1.1"
    headers = [(b"Host", b"node:10417"), (b"Accept", OPENMETRICS), (b"Accept-Encoding", b"gzip")]
    if choose.random() < 0.7:  # otherwise the password is missing
        headers.append((b"Authorization", PASSWORD))
    body = b""
    for _ in range(choose.randint(0, 3)):
        what = choose.randrange(5)
        method = choose.choice(METHODS) if what == 0 else method
        path = choose.choice(PATHS) if what == 1 else path
        version = choose.choice(VERSIONS) if what == 2 else version
        body = choose.choice(BODIES) if what == 3 else body
        if what == 4:
            headers.insert(choose.randrange(len(headers) + 1), choose.choice(ODD_HEADERS))
    lines = [b"%s %s %s" % (method, path, version), *(b"%s: %s" % header for header in headers), b"", body]
    return b"\r\n".join(lines)


def _bits(choose: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 8))):
        changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def _line_ends(choose: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", choose.choice((b"\n", b"\r", b"\r\r\n", b"\n\n", b"\r\n ")), choose.choice((1, 2, -1)))


def _cut(choose: random.Random, data: bytes) -> bytes:
    return data[: choose.randrange(1, len(data) + 1)]


def _twice(choose: random.Random, data: bytes) -> bytes:
    start = choose.randrange(len(data))
    end = choose.randrange(start, len(data))
    return data[:end] + data[start:end] * choose.choice((1, 2, 100)) + data[end:]


def _noise(choose: random.Random, data: bytes) -> bytes:
    at = choose.randrange(len(data))
    return data[:at] + choose.randbytes(choose.choice((1, 4, 100))) + data[at:]


def _whole(choose: random.Random, data: bytes) -> bytes:
    return choose.choice(
        (choose.randbytes(300), b"\x16\x03\x01" + data, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50 + data)
    )


MUTATIONS = (_bits, _line_ends, _cut, _twice, _noise, _whole)


class ErrorLog(logging.Handler):
    """The log messages from ERROR on, which no client may cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message with its exception."""
        error = repr(record.exc_info[1]) if record.exc_info else ""
        self.lines.append(f"{record.getMessage().strip()} {error}")


@contextmanager
def server(directory: Path) -> Iterator[tuple[int, ErrorLog]]:
    """Run the exporter's server, with the cheapest password hash that bcrypt allows."""
    config = directory / "web.yml"
    config.write_text(
        yaml.safe_dump({"basic_auth_users": {"fuzz": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()}})
    )
    gpus: Any = SimpleNamespace(is_ready=True, is_released=False, release=lambda _: None, resume=lambda: None)
    run_directory = RunDirectory([directory])
    ranks: Any = SimpleNamespace(name="ranks", help="", collect=lambda: Ranks().poll(run_directory.scan()))
    app = create_app(Scrape([ranks]), gpus, has_lifecycle=True)
    running = uvicorn.Server(server_configuration(app, WebConfigFile(config)))
    errors = ErrorLog()
    logging.getLogger().addHandler(errors)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield port, errors
        finally:
            running.should_exit = True
            thread.join()
            logging.getLogger().removeHandler(errors)


async def send(port: int, parts: list[bytes]) -> list[int]:
    """Return the statuses of the answers on this connection, until the server closes it or waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        while part := await asyncio.wait_for(reader.read(1 << 20), UNANSWERED):
            answer += part
    except (ConnectionError, asyncio.TimeoutError):
        pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return [int(status) for status in STATUS.findall(answer)]


async def good(port: int) -> None:
    """Scrape as Prometheus does. Raises FuzzError."""
    lines = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %s\r\n\r\n" % PASSWORD
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(lines)
    try:
        answer = await asyncio.wait_for(reader.read(), 30)
    except (ConnectionError, asyncio.TimeoutError) as error:
        raise FuzzError(f"the valid scrape afterwards: {error!r}") from error
    finally:
        writer.close()
    if not (answer.startswith(b"HTTP/1.1 200") and b'collector_success{collector="ranks"} 1.0' in answer):
        raise FuzzError(f"the valid scrape afterwards: {answer[:200]!r}")


async def batch(port: int, errors: ErrorLog, seed: int, numbers: range) -> Counter[str]:
    """Send these requests at once, then a valid scrape. Raises FuzzError."""
    answers = await asyncio.gather(*(send(port, damaged(seed, number)) for number in numbers))
    await good(port)
    if errors.lines:
        raise FuzzError(errors.lines[0])
    statuses = Counter(str(status) for answer in answers for status in answer)
    if statuses["500"]:
        raise FuzzError("an answer with the status 500")
    return statuses + Counter({"without an answer": sum(not answer for answer in answers)})


async def fuzz(port: int, errors: ErrorLog, seed: int, first: int, requests: int) -> Counter[str]:
    """Send requests `first` … `first + requests`. Return the outcomes. Raises FuzzError that names the request."""
    outcome: Counter[str] = Counter()
    for start in range(first, first + requests, BATCH):
        numbers = range(start, min(start + BATCH, first + requests))
        try:
            outcome += await batch(port, errors, seed, numbers)
        except FuzzError as error:
            raise FuzzError(f"seed {seed}, {await _failing_request(port, errors, seed, numbers)}: {error}") from error
    return outcome


async def _failing_request(port: int, errors: ErrorLog, seed: int, numbers: range) -> str:
    """Return which request of the batch fails, by trying each alone."""
    for number in numbers:
        errors.lines.clear()
        try:
            await batch(port, errors, seed, range(number, number + 1))
        except FuzzError:
            return f"request {number}"
    return f"requests {numbers.start} to {numbers.stop - 1} together"


def run(directory: Path, seed: int, first: int, requests: int) -> Counter[str]:
    """Fuzz a server of its own. Raises FuzzError."""
    with server(directory) as (port, errors):
        outcome = asyncio.run(fuzz(port, errors, seed, first, requests))
    if errors.lines:
        raise FuzzError(f"seed {seed}, requests {first} to {first + requests - 1}: {errors.lines[0]}")
    return outcome


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        fuzzing.main(__doc__, "requests", partial(run, Path(directory)), "fuzz_requests", BOUND)


if __name__ == "__main__":
    main()
