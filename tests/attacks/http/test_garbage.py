"""What attackers leave is gone with them: full collections of garbage, 0.2 s each, held up every scrape of a siege."""

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
WORDS = {
    "silence": b"",
    "an unfinished request": START,
    "a request": START + b"\r\n",
    "more requests than are answered": (START + b"\r\n") * 8,
    "no request": b"\x16\x03\x01 no HTTP\r\n\r\n",
    "too long a request": START + b"a: b\r\n" * 1000,
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(type(one) is BoundedProtocol for one in gc.get_objects())  # isinstance() asks some for more than that


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_connection_that_has_ended_is_freed_at_once(
    no_collection: None, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    lost, connection_lost = [0], BoundedProtocol.connection_lost

    def counted(self: BoundedProtocol, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost[0] += 1

    monkeypatch.setattr(BoundedProtocol, "connection_lost", counted)
    with server() as (port, _):
        for _ in range(CONNECTIONS):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(words)
        eventually(lambda: (lost[0], alive()) == (CONNECTIONS, 0), seconds=30, pause=0.05)
