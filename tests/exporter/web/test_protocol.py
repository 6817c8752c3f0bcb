"""One connection of the exporter's server, by itself: deadlines, turns, and what is held for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from tests.attacks.http.clients import Large
from tests.exporter.web.conftest import READY
from uvicorn.server import ServerState

from rankscope_exporter.daemon import server_configuration
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.web import protocol
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.connections import Connections, RateLimitedLog, Turns
from rankscope_exporter.web.protocol import IDLE, REQUESTING, BoundedProtocol

HEALTHY = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"


class Socket(asyncio.Transport):
    """A client's connection that remembers what was written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.7", 1)})
        self.written = b""
        self.is_reading = True
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing


class Server:
    """What connections share."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.connections = Connections(page_bytes=100)
        self._configuration: uvicorn.Config = server_configuration(create_app(Scrape([Large()]), READY), None)

    def connect(self) -> tuple[BoundedProtocol, Socket]:
        """A new connection, all from one address."""
        made = BoundedProtocol(
            connections=self.connections,
            turns=self.turns,
            told=RateLimitedLog(),
            tls=None,
            config=self._configuration,
            server_state=ServerState(),
            app_state={},
        )
        client = Socket()
        made.connection_made(client)
        return made, client

    async def answered(self, client: Socket, answers: int = 1) -> None:
        """Wait until the client has so many answers."""
        async with asyncio.timeout(20):
            while client.written.count(b"HTTP/1.1 200") < answers or not client.written.endswith(b"healthy\n"):
                await asyncio.sleep(0)


def run(scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Server())

    asyncio.run(main())


def test_what_waits_for_its_turn_is_dropped_with_its_connection() -> None:
    async def scenario(server: Server) -> None:
        first, _ = server.connect()
        first.data_received(HEALTHY)
        crowd = [server.connect() for _ in range(20)]
        for connection, client in crowd:
            connection.data_received(b"GET /" + b"a" * 60_000)
            assert connection.is_pending
            assert not client.is_reading
        assert server.turns.queued == 20
        for connection, _ in crowd[:10]:
            connection.connection_lost(ConnectionResetError())
        for connection, _ in crowd[10:15]:
            connection.cut_off("too many connections")
        assert server.turns.queued == 5
        assert sum(len(connection._unparsed) for connection, _ in crowd) == 5 * 60_005

    run(scenario)


def test_a_client_that_sends_requests_ahead_is_closed_before_one_that_does_not() -> None:
    async def scenario(server: Server) -> None:
        ahead, alone, idle = (server.connect()[0] for _ in range(3))
        alone.data_received(HEALTHY)
        assert alone.is_pending
        await asyncio.sleep(0)
        ahead.data_received(HEALTHY * 2)
        assert not ahead.is_pending
        assert not idle.is_pending

    run(scenario)


def test_a_request_that_waits_for_its_turn_is_answered_though_its_connection_was_idle_for_too_long() -> None:
    async def scenario(server: Server) -> None:
        connection, client = server.connect()
        connection.data_received(HEALTHY)
        await server.answered(client)
        other, _ = server.connect()
        await asyncio.sleep(0)
        other.data_received(HEALTHY)
        connection.data_received(HEALTHY)
        assert (connection._state, connection.is_pending) == (IDLE, True)
        connection._expire()  # its deadline comes in this moment
        assert not client.is_closing()
        await server.answered(client, answers=2)

    run(scenario)


def test_a_request_that_does_not_end_expires_when_its_last_byte_has_had_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol.limits, "EXPIRED_AGAIN", 0.0)

    async def scenario(server: Server) -> None:
        other, _ = server.connect()
        connection, client = server.connect()
        other.data_received(HEALTHY)
        connection.data_received(HEALTHY[:9])
        connection._expire()
        assert (connection._state, client.is_closing()) == (REQUESTING, False)
        async with asyncio.timeout(20):
            while not client.is_closing():
                await asyncio.sleep(0)

    run(scenario)


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
def test_a_connection_that_is_lost_leaves_no_timer(error: Exception | None) -> None:
    async def scenario(server: Server) -> None:
        connection, client = server.connect()
        connection.data_received(HEALTHY)
        await server.answered(client)
        assert connection.timeout_keep_alive_task is None
        connection.connection_lost(error)
        assert connection.timeout_keep_alive_task is None
        assert connection._deadline is not None
        assert connection._deadline.cancelled()

    run(scenario)


def test_a_page_is_counted_while_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server) -> None:
        counted: list[int] = []

        async def turn(_: BoundedProtocol) -> None:
            counted.append(server.connections.held_bytes)

        monkeypatch.setattr(BoundedProtocol, "turn", turn)
        connection, client = server.connect()
        connection.data_received(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
        assert counted == [len(client.written.partition(b"\r\n\r\n")[2])]
        await asyncio.sleep(0)
        assert server.connections.held_bytes == 0

    run(scenario)


def test_a_page_that_waits_ends_its_wait_when_its_connection_closes() -> None:
    async def scenario(server: Server) -> None:
        other, _ = server.connect()
        connection, _ = server.connect()
        other.data_received(HEALTHY)
        turn = asyncio.create_task(connection.turn())
        await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.wait_for(turn, 20)
        await asyncio.wait_for(connection.turn(), 20)

    run(scenario)
