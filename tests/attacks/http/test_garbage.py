"""Closed connections are freed without the garbage collector, whose full collections delay scrapes by 0.2 s each."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest
from testing.waiting import eventually
from tests.attacks.http.clients import server

from rankscope_exporter.web.protocol import BoundedProtocol

CONNECTIONS = 20
START = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n"
DATA = {
    "nothing": b"",
    "an incomplete request": START,
    "a request": START + b"\r\n",
    "more requests than are answered": (START + b"\r\n") * 8,
    "an invalid request": b"\x16\x03\x01 no HTTP\r\n\r\n",
    "a request that is too long": START + b"a: b\r\n" * 1000,
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(type(instance) is BoundedProtocol for instance in gc.get_objects())  # isinstance() may run their code


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_a_closed_connection_is_freed_at_once(
    no_collection: None, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    lost, connection_lost = [0], BoundedProtocol.connection_lost

    def count_lost(self: BoundedProtocol, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost[0] += 1

    monkeypatch.setattr(BoundedProtocol, "connection_lost", count_lost)
    with server() as (port, _):
        for _ in range(CONNECTIONS):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(data)
        eventually(lambda: (lost[0], alive()) == (CONNECTIONS, 0), seconds=30, pause=0.05)
