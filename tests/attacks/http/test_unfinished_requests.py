"""Attack: connections without a complete request, held for ever, until there is none left for a scrape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from testing.exporter_process import EXPORTER, exporter_process
from tests.attacks.http.clients import Large, ask, connect, everything, scrape, server

BEGINNINGS = {
    "nothing": b"",
    "half a line": b"GET /metr",
    "headers without an end": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "a body that does not come": b"POST /-/release HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    "a chunk that does not come": b"POST /-/release HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n1",
    "a second request's first byte": b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\nG",
    "an empty line after a request": b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n\r\n",
}


def test_a_connection_whose_request_does_not_end_is_closed() -> None:
    with server() as (port, _), ExitStack() as stack:
        held = {name: stack.enter_context(connect(port)) for name in BEGINNINGS}
        for name, connection in held.items():
            connection.sendall(BEGINNINGS[name])
        for connection in held.values():
            everything(connection)  # raises where the server does not close


def test_a_connection_that_never_begins_tls_is_closed(
    serve: Callable[[Path], int], web_config: Callable[..., Path], authority: object
) -> None:
    port = serve(web_config(tls_server_config={"cert_file": "server.pem", "key_file": "server.key"}))
    with connect(port) as silent, connect(port) as half:
        half.sendall(b"\x16\x03\x01\x02\x00")  # a ClientHello's first bytes
        assert everything(silent) == everything(half) == b""


@pytest.mark.parametrize("beginning", ["nothing", "headers without an end", "an empty line after a request"])
def test_a_scrape_gets_in_though_one_client_holds_more_connections_than_there_are_descriptors(
    free_port: int, run_dir: Path, beginning: str
) -> None:
    program = ("prlimit", "--nofile=64:64", *EXPORTER)
    with exporter_process(free_port, f"--run-dir={run_dir}", program=program), ExitStack() as held:
        for _ in range(200):
            held.enter_context(connection := connect(free_port))
            with suppress(ConnectionError):  # it has given way to those after it
                connection.sendall(BEGINNINGS[beginning])
        assert [scrape(free_port) for _ in range(20)] == [200] * 20


def test_connections_of_one_address_never_cost_another_its_own() -> None:
    with server() as (port, other), ExitStack() as held, connect(other, "::1") as kept:
        for _ in range(300):
            held.enter_context(connect(port))
        kept.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert everything(kept).startswith(b"HTTP/1.1 200")
        assert scrape(other, host="::1") == 200


def test_a_scrape_gets_in_though_its_own_address_holds_all_connections_with_unread_answers() -> None:
    with server(Large(16 * 1024 * 1024)) as (port, _), ExitStack() as held:
        crowd = [held.enter_context(ask(port, "/-/healthy")) for _ in range(128)]
        for connection in crowd:
            connection.recv(4096)
        for connection in crowd:  # in turn, so that they have pages of their own; most are cut off for the last ones'
            with suppress(ConnectionError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert [scrape(port) for _ in range(5)] == [200] * 5
