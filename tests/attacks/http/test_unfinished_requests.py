"""Attack: open connections without a complete request, until a scrape cannot connect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from testing.exporter_process import EXPORTER, exporter_process
from tests.attacks.http.clients import Large, connect, read_all, request, scrape, server

from rankscope_exporter.web import limits, protocol

BEGINNINGS = {
    "nothing": b"",
    "half a line": b"GET /metr",
    "incomplete headers": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "an incomplete body": b"POST /-/release HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    "an incomplete chunk": b"POST /-/release HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n1",
    "a second request's first byte": b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\nG",
    "an empty line after a request": b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n\r\n",
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server wait only 2 s for a request."""
    monkeypatch.setitem(protocol.SECONDS, protocol.REQUESTING, 2.0)


@pytest.mark.usefixtures("impatient")
def test_a_connection_with_an_incomplete_request_is_closed() -> None:
    with server() as (port, _), ExitStack() as stack:
        connections = {name: stack.enter_context(connect(port)) for name in BEGINNINGS}
        for name, connection in connections.items():
            connection.sendall(BEGINNINGS[name])
        for connection in connections.values():
            read_all(connection)  # raises if the server does not close it


@pytest.mark.usefixtures("impatient")
def test_a_connection_without_a_complete_handshake_is_closed(
    serve: Callable[[Path], int], web_config: Callable[..., Path], authority: object
) -> None:
    port = serve(web_config(tls_server_config={"cert_file": "server.pem", "key_file": "server.key"}))
    with connect(port) as silent, connect(port) as half:
        half.sendall(b"\x16\x03\x01\x02\x00")  # the first bytes of a ClientHello
        assert read_all(silent) == read_all(half) == b""


@pytest.mark.parametrize("beginning", ["nothing", "incomplete headers", "an empty line after a request"])
def test_a_scrape_succeeds_while_one_client_opens_more_connections_than_there_are_descriptors(
    free_port: int, run_dir: Path, beginning: str
) -> None:
    program = ("prlimit", "--nofile=64:64", *EXPORTER)
    with exporter_process(free_port, f"--run-dir={run_dir}", program=program), ExitStack() as opened:
        for _ in range(200):
            opened.enter_context(connection := connect(free_port))
            with suppress(ConnectionError):  # the server has closed it for a later one
                connection.sendall(BEGINNINGS[beginning])
        assert [scrape(free_port) for _ in range(20)] == [200] * 20


def test_connections_of_one_address_do_not_close_those_of_another() -> None:
    with server() as (port, other), ExitStack() as opened, connect(other, "::1") as kept:
        for _ in range(2 * limits.CONNECTIONS):
            opened.enter_context(connect(port))
        kept.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(kept).startswith(b"HTTP/1.1 200")
        assert scrape(other, host="::1") == 200


def test_a_scrape_succeeds_while_its_address_has_all_connections_with_unread_responses() -> None:
    with server(Large(16 * 1024 * 1024)) as (port, _), ExitStack() as opened:
        attackers = [opened.enter_context(request(port, "/-/healthy")) for _ in range(limits.CONNECTIONS)]
        for connection in attackers:
            connection.recv(4096)
        for connection in attackers:  # one after another, so that each gets its own page and most are cut off
            with suppress(ConnectionError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert [scrape(port) for _ in range(5)] == [200] * 5
