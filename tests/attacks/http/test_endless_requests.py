"""Attack: endless requests: one long header, many headers, a body, or pipelined requests."""

from __future__ import annotations

import ctypes
import ctypes.util
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from testing.authority import Authority
from tests.attacks.http.clients import Large, connect, flood, read_all, scrape, server, status
from validation.siege.clients import ENDLESS, ENDLESS_BYTES, POST, START
from validation.siege.target import any_server

from rankscope_exporter.web.limits import REQUEST_BYTES, REQUEST_SECONDS


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_request_is_cut_off_and_a_scrape_succeeds(kind: str) -> None:
    beginning, part = ENDLESS[kind]
    with server() as (port, _), connect(port) as connection:
        connection.sendall(beginning)
        assert flood(connection, part, ENDLESS_BYTES) < ENDLESS_BYTES
        assert scrape(port) == 200


@pytest.fixture
def tls(authority: Authority, web_config: Callable[..., Path]) -> Path:
    return web_config(tls_server_config={"cert_file": "server.pem", "key_file": "server.key"})


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_request_over_tls_is_cut_off(kind: str, tls: Path) -> None:
    beginning, part = ENDLESS[kind]
    with server(web_config=tls) as (port, _), any_server().wrap_socket(connect(port)) as connection:
        connection.sendall(beginning)
        assert flood(connection, part, ENDLESS_BYTES) < ENDLESS_BYTES


def test_a_request_rejected_over_tls_gets_a_status(tls: Path) -> None:
    with server(web_config=tls) as (port, _), any_server().wrap_socket(connect(port)) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert status(read_all(connection)) == 400


def test_data_after_the_end_of_tls_is_ignored(tls: Path) -> None:
    received, unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = any_server().wrap_bio(received, unsent)
    with server(web_config=tls) as (port, _), connect(port) as connection:
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        connection.sendall(unsent.read())
        received.write(connection.recv(65536))
        client.do_handshake()
        with suppress(ssl.SSLWantReadError):
            client.unwrap()
        connection.sendall(unsent.read() + b"more")
        read_all(connection)  # raises if the server does not close it


def test_a_page_over_tls_arrives_completely_and_ends_with_a_close_notify(tls: Path) -> None:
    page = Large(16 * 1024 * 1024)  # more than the kernel buffers
    with server(page, web_config=tls) as (port, _):
        context = any_server()
        with context.wrap_socket(connect(port), suppress_ragged_eofs=False) as connection:
            connection.sendall(START + b"Connection: close\r\n\r\n")
            headers, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in headers + b"\r\n"


@pytest.mark.parametrize("headers", [b"a: b\r\n" * 101, b"X-Long: " + b"a" * 66000 + b"\r\n"])
def test_too_many_or_too_long_headers_are_rejected_with_status_431(headers: bytes) -> None:
    with server() as (port, _), connect(port) as connection:
        connection.sendall(START + headers)
        assert status(read_all(connection)) == 431


def test_a_request_with_an_unused_body_is_answered() -> None:
    with server() as (port, _), connect(port) as connection:
        connection.sendall(POST + b"Connection: close\r\nContent-Length: 10000\r\n\r\n" + b"a" * 10000)
        assert status(read_all(connection)) == 403  # no --web.enable-lifecycle


def test_a_few_pipelined_requests_are_all_answered() -> None:
    with server() as (port, _), connect(port) as connection:
        connection.sendall(
            b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 5
            + b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        assert read_all(connection).count(b"HTTP/1.1 200") == 6


def test_a_handshake_larger_than_a_request_is_cut_off(tls: Path) -> None:
    """OpenSSL accepts a ClientHello of 128 KiB."""
    hello = b"\x01\x01\xff\x00" + b"a" * 16380
    record = b"\x16\x03\x01\x40\x00"
    with server(web_config=tls) as (port, _), connect(port) as connection:
        connection.sendall(record + hello + 5 * (record + b"a" * 16384))
        connection.settimeout(REQUEST_SECONDS / 2)  # after REQUEST_SECONDS, it is closed in any case
        with suppress(ConnectionResetError):  # the server has not read all of it
            read_all(connection)


def test_tls_records_without_content_are_cut_off(tls: Path) -> None:
    """The records ask the server for new keys, and the client reads no answer."""
    library = ctypes.CDLL(ctypes.util.find_library("ssl"))
    received, unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = any_server().wrap_bio(received, unsent)
    session = ctypes.c_void_p.from_address(id(client._sslobj) + 24)  # type: ignore[attr-defined]  # its SSL*
    with server(web_config=tls) as (port, _), connect(port) as connection:
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        connection.sendall(unsent.read())
        received.write(connection.recv(65536))
        client.do_handshake()
        for _ in range(4000):
            assert library.SSL_key_update(session, 1) == 1
            assert library.SSL_do_handshake(session) == 1
        assert unsent.pending > REQUEST_BYTES
        connection.sendall(unsent.read())
        connection.settimeout(REQUEST_SECONDS / 2)
        with suppress(ConnectionResetError):
            read_all(connection)
