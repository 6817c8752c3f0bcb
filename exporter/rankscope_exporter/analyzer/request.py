"""One GET request with limits: no redirect, no more bytes than the limits, no longer than its time."""

from __future__ import annotations

import asyncio
import os
import ssl
import zlib
from collections.abc import Mapping
from http.client import responses
from typing import NamedTuple

import httptools

LIMIT = 16 * 2**20
"""The most bytes of an answer, as received and unpacked, unless the caller expects fewer."""
READ_BYTES = 64 * 1024
HEADER_LIMIT = 32 * 1024
GZIP = 31
"""zlib's window bits of the gzip format."""


class Target(NamedTuple):
    """A server's address."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""
    """A prefix of the path, as behind a reverse proxy; without a slash at its end."""
    server_name: str = ""
    """The name in its certificate and in the header `Host`; by default the host."""
    is_configured: bool = True
    """True if the configuration has this name. Only such a target gets credentials."""

    @property
    def name(self) -> str:
        """The address as text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


class RequestError(Exception):
    """A request without a usable answer. The text is a short reason."""


class _Received:
    """Callbacks of httptools: the answer so far."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self._limit:
            raise RequestError("too large")

    def on_message_complete(self) -> None:
        self.is_complete = True


async def get(
    target: Target,
    path: str,
    headers: Mapping[str, str],
    timeout: float,
    tls: ssl.SSLContext | None = None,
    limit: int = LIMIT,
) -> bytes:
    """Return the unpacked body of the page, of at most `limit` bytes. Raise RequestError."""
    try:
        async with asyncio.timeout(timeout):
            received = await _received(target, _request(target, path, headers), tls, limit)
    except ssl.SSLCertVerificationError as error:
        raise RequestError(f"TLS: {error.verify_message.rstrip('.')}") from error
    except ssl.SSLError as error:
        raise RequestError(f"TLS: {error.reason or 'failed'}") from error
    except OSError as error:
        raise RequestError(error_text(error)) from error
    except UnicodeError as error:  # no resolver is asked for such a name
        raise RequestError("not a name") from error
    is_packed = received.headers.get("content-encoding", "") == "gzip"
    return unpack(bytes(received.body), limit) if is_packed else bytes(received.body)


def error_text(error: OSError) -> str:
    """Return what the system says. asyncio replaces the text of a refused connection by its address."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if error.errno and error.errno > 0:  # a failed look-up has a number of its own
        return os.strerror(error.errno)
    return error.strerror or "cannot connect"


def _request(target: Target, path: str, headers: Mapping[str, str]) -> bytes:
    named = target._replace(host=target.server_name or target.host)
    host = named.name.partition("//")[2].partition("/")[0]
    lines = [f"GET {target.path}{path} HTTP/1.1", f"Host: {host}", "Accept-Encoding: gzip", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1")


async def _received(target: Target, request: bytes, tls: ssl.SSLContext | None, limit: int) -> _Received:
    """Return the answer with status 200. Raise RequestError, OSError or UnicodeError."""
    reader, writer = await asyncio.open_connection(
        target.host,
        target.port,
        ssl=(tls or ssl.create_default_context()) if target.is_tls else None,
        server_hostname=(target.server_name or target.host) if target.is_tls else None,
        limit=READ_BYTES,
    )
    try:
        writer.write(request)
        received = _Received(limit)
        parser, size = httptools.HttpResponseParser(received), 0
        while not received.is_complete and (data := await reader.read(READ_BYTES)):
            size += len(data)
            if size > limit + HEADER_LIMIT or (not received.body and size > HEADER_LIMIT + READ_BYTES):
                raise RequestError("too large")
            parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        if isinstance(error.__context__, RequestError):
            raise error.__context__ from None
        raise RequestError("not HTTP") from error
    finally:
        writer.transport.abort()  # a close would wait for the server: 30 s with TLS
    if not (status := parser.get_status_code()):
        raise RequestError("connection closed without an answer; if it uses TLS, write https://")
    if status != 200:
        page = request.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
        raise RequestError(f"status {status} {responses.get(status, '')} at {page}")
    return received


def unpack(packed: bytes, limit: int = LIMIT) -> bytes:
    """Return the content of a gzip file, of at most `limit` bytes. Raise RequestError if it is larger or damaged."""
    unpacking = zlib.decompressobj(GZIP)
    try:
        plain = unpacking.decompress(packed, limit)
    except zlib.error as error:
        raise RequestError("damaged gzip") from error
    if unpacking.unconsumed_tail:
        raise RequestError("too large")
    if not unpacking.eof:
        raise RequestError("damaged gzip")
    return plain
