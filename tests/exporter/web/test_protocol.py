"""A single connection of the server: deadlines, turns and memory."""

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
from rankscope_exporter.web.connections import Connections, FairQueue, RateLimitedLog
from rankscope_exporter.web.protocol import IDLE, REQUESTING, BoundedProtocol

HEALTHY = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"


class Socket(asyncio.Transport):
    """A client's connection that records what was written to it."""

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
    """The objects that connections share."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.connections = Connections(page_bytes=100)
        self._configuration: uvicorn.Config = server_configuration(create_app(Scrape([Large()]), READY), None)

    def connect(self) -> tuple[BoundedProtocol, Socket]:
        """Open a new connection from the one address that all have."""
        connection = BoundedProtocol(
            connections=self.connections,
            queue=self.queue,
            closed_log=RateLimitedLog(),
            tls=None,
            config=self._configuration,
            server_state=ServerState(),
            app_state={},
        )
        client = Socket()
        connection.connection_made(client)
        return connection, client

    async def wait_for_responses(self, client: Socket, count: int = 1) -> None:
        """Wait until the client has received `count` responses."""
        async with asyncio.timeout(20):
            while client.written.count(b"HTTP/1.1 200") < count or not client.written.endswith(b"healthy\n"):
                await asyncio.sleep(0)


def run(scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Server())

    asyncio.run(main())


def test_queued_data_is_dropped_with_its_connection() -> None:
    async def scenario(server: Server) -> None:
        first, _ = server.connect()
        first.data_received(HEALTHY)
        others = [server.connect() for _ in range(20)]
        for connection, client in others:
            connection.data_received(b"GET /" + b"a" * 60_000)
            assert connection.is_pending
            assert not client.is_reading
        assert len(server.queue) == 20
        for connection, _ in others[:10]:
            connection.connection_lost(ConnectionResetError())
        for connection, _ in others[10:15]:
            connection.cut_off("too many connections")
        assert len(server.queue) == 5
        assert sum(len(connection._unparsed) for connection, _ in others) == 5 * 60_005

    run(scenario)


def test_a_client_with_pipelined_requests_is_not_pending() -> None:
    async def scenario(server: Server) -> None:
        pipelined, single, idle = (server.connect()[0] for _ in range(3))
        single.data_received(HEALTHY)
        assert single.is_pending
        await asyncio.sleep(0)
        pipelined.data_received(HEALTHY * 2)
        assert not pipelined.is_pending
        assert not idle.is_pending

    run(scenario)


def test_a_queued_request_is_answered_after_the_idle_deadline() -> None:
    async def scenario(server: Server) -> None:
        connection, client = server.connect()
        connection.data_received(HEALTHY)
        await server.wait_for_responses(client)
        other, _ = server.connect()
        await asyncio.sleep(0)
        other.data_received(HEALTHY)
        connection.data_received(HEALTHY)
        assert (connection._state, connection.is_pending) == (IDLE, True)
        connection._expire()  # the deadline passes now
        assert not client.is_closing()
        await server.wait_for_responses(client, count=2)

    run(scenario)


def test_an_incomplete_request_expires_after_its_data_was_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.limits, "EXPIRY_RETRY_SECONDS", 0.0)

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
def test_a_closed_connection_has_no_timer(error: Exception | None) -> None:
    async def scenario(server: Server) -> None:
        connection, client = server.connect()
        connection.data_received(HEALTHY)
        await server.wait_for_responses(client)
        assert connection.timeout_keep_alive_task is None
        connection.connection_lost(error)
        assert connection.timeout_keep_alive_task is None
        assert connection._deadline is not None
        assert connection._deadline.cancelled()

    run(scenario)


def test_a_page_is_counted_while_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server) -> None:
        counted: list[int] = []

        async def wait_for_turn(_: BoundedProtocol) -> None:
            counted.append(server.connections.sending_bytes)

        monkeypatch.setattr(BoundedProtocol, "wait_for_turn", wait_for_turn)
        connection, client = server.connect()
        connection.data_received(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
        assert counted == [len(client.written.partition(b"\r\n\r\n")[2])]
        await asyncio.sleep(0)
        assert server.connections.sending_bytes == 0

    run(scenario)


def test_a_page_stops_waiting_when_its_connection_closes() -> None:
    async def scenario(server: Server) -> None:
        other, _ = server.connect()
        connection, _ = server.connect()
        other.data_received(HEALTHY)
        waiting = asyncio.create_task(connection.wait_for_turn())
        await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.wait_for(waiting, 20)
        await asyncio.wait_for(connection.wait_for_turn(), 20)

    run(scenario)
