"""Who gives way where there are too many connections, or too much that nobody reads; and whose turn it is."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import ExitStack
from functools import partial

import pytest
import uvloop

from rankscope_exporter.daemon import listeners
from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Connections, Page, Told, Turns, whose


class Client:
    """A connection that remembers why it was cut off."""

    def __init__(self, address: str, since: float = 0.0) -> None:
        self.address = address
        self.since = since
        self.is_lost = False
        self.reasons: list[str] = []

    def cut_off(self, reason: str) -> None:
        self.reasons.append(reason)


def cut_off(clients: list[Client]) -> list[int]:
    return [number for number, client in enumerate(clients) if client.reasons]


def test_the_address_that_has_the_most_connections_gives_way() -> None:
    connections = Connections(limit=4)
    scrape, *crowd = clients = [Client("prometheus"), *(Client("attacker", number) for number in range(6))]
    for client in clients:
        connections.add(client)
    assert cut_off(crowd) == [0, 1, 2]
    assert not scrape.reasons
    assert len(connections) == 4


def test_of_one_address_the_one_gives_way_that_has_done_the_same_for_longest() -> None:
    connections = Connections(limit=3)
    clients = [Client("x", since) for since in (5.0, 2.0, 1.0, 3.0, 4.0)]
    for client in clients:
        connections.add(client)
    assert cut_off(clients) == [1, 2]


def test_the_newest_gets_in_whatever_there_is() -> None:
    connections = Connections(limit=2)
    clients = [Client("x", -number) for number in range(5)]
    for client in clients:
        connections.add(client)
    assert not clients[-1].reasons
    assert len(connections) == 2


def test_pages_are_counted_once_and_the_oldest_of_the_greediest_address_gives_way() -> None:
    connections = Connections(limit=100, page_bytes=300)
    shared = Page(b"x" * 100)
    clients = [*(Client("prometheus", number) for number in range(2)), *(Client("y", number) for number in range(5))]
    for client in clients[:2]:
        connections.sends(client, shared)
    assert connections.held_bytes == 100
    for client in clients[2:]:
        connections.sends(client, Page(b"y" * 100))
    assert cut_off(clients) == [2, 3, 4]
    connections.has_sent(clients[5])
    assert connections.held_bytes == 200


def test_a_page_above_the_bound_is_sent_to_one_at_a_time() -> None:
    connections = Connections(page_bytes=10)
    clients = [Client("x"), Client("y")]
    for client in clients:
        connections.sends(client, Page(b"x" * 100))
    assert cut_off(clients) == [0]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("127.0.0.1", "127.3.2.1", True),
        ("127.0.0.1", "::1", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_addresses_that_one_machine_can_give_itself_are_one(one: str, other: str, is_same: bool) -> None:
    assert (whose(one) == whose(other)) is is_same


@pytest.mark.parametrize(("descriptors", "connections"), [(64, 16), (256, 64), (1 << 20, limits.CONNECTIONS), (4, 2)])
def test_connections_leave_most_descriptors_to_the_exporter(
    descriptors: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert limits.connections() == connections
    assert limits.connections() + limits.accepted_at_once() <= max(4, descriptors // 3)


async def done_by_turn(asked: list[tuple[str, int]]) -> list[list[int]]:
    """What is done in each turn of the event loop of what these addresses ask for."""
    turns, done = Turns(), list[list[int]]([[]])
    for address, number in asked:
        turns.take(address, partial(lambda number: done[-1].append(number), number))
    while sum(map(len, done)) < len(asked):
        done.append([])
        await asyncio.sleep(0)
    return done


def test_one_thing_of_each_address_is_done_in_a_turn_and_in_the_order_of_asking() -> None:
    crowd = [("attacker", number) for number in range(3)]
    asked = [*crowd, ("prometheus", 10), ("attacker", 3), ("prometheus", 11)]
    assert asyncio.run(done_by_turn(asked)) == [[0, 10], [1, 11], [2], [3]]


def test_an_address_that_asks_again_in_a_later_turn_need_not_wait() -> None:
    async def later() -> tuple[bool, bool, bool]:
        turns = Turns()
        first = turns.take("x", lambda: None)
        await asyncio.sleep(0)
        second, third = (turns.take("x", lambda: None) for _ in range(2))
        return first, second, third

    assert asyncio.run(later()) == (True, True, False)


def test_a_mistake_in_one_turn_keeps_nobody_else_waiting() -> None:
    async def mistaken() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns = Turns()
        for address in ("x", "y", "z"):
            turns.take(address, lambda: None)
        turns.take("x", lambda: 1 / 0)
        await asyncio.wait_for(asyncio.gather(*(turns.wait(address) for address in ("x", "y", "z"))), 10)

    asyncio.run(mistaken())


def test_hundreds_of_connections_that_wait_are_accepted_in_a_few_turns() -> None:
    async def turns_of(number: int) -> int:
        loop, made, turns = asyncio.get_running_loop(), list[object](), 0

        class Silent(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
            # A server each, as uvicorn's, which closes the socket with it.
            servers = [await loop.create_server(Silent, sock=one, backlog=number) for one in listeners(listener)]
            for _ in range(number):
                opened.enter_context(socket.create_connection(listener.getsockname()))
            while len(made) < number:
                turns += 1
                await asyncio.sleep(0)
            for server in servers:
                server.close()
            await asyncio.gather(*(server.wait_closed() for server in servers))
        return turns

    assert uvloop.run(turns_of(10 * limits.ACCEPTED_AT_ONCE)) < 2 * limits.ACCEPTED_AT_ONCE


def test_clients_that_are_cut_off_cost_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    told = Told(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        told.note("idle")
    assert [record.getMessage() for record in caplog.records] == [
        "clients cut off: 1 (idle)",
        "clients cut off: 3 (idle)",
    ]
