"""Who gives way where there are too many connections, or too much that nobody reads; and whose turn it is."""

from __future__ import annotations

import asyncio
import resource
from functools import partial

import pytest

from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Connections, Page, RateLimitedLog, Turns, whose


class Client:
    """A connection that remembers why it was cut off."""

    def __init__(self, address: str, since: float = 0.0, *, is_pending: bool = False) -> None:
        self.address = address
        self.since = since
        self.is_lost = False
        self.is_pending = is_pending
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
    assert limits.connections() + limits.queues() <= max(4, descriptors // 3)


def test_a_connection_that_waits_for_the_server_is_closed_only_if_all_of_its_address_do() -> None:
    connections = Connections(limit=3)
    scrape, *crowd = clients = [Client("x", 0.0, is_pending=True), *(Client("x", since) for since in (1.0, 2.0, 3.0))]
    for client in clients:
        connections.add(client)
    assert cut_off(crowd) == [0]
    assert not scrape.reasons
    for since in (4.0, 5.0):
        connections.add(Client("x", since, is_pending=True))
    assert cut_off(crowd) == [0, 1, 2]
    assert not scrape.reasons
    connections.add(Client("x", 6.0))
    assert scrape.reasons


async def done_by_turn(asked: list[tuple[Client, int]], seconds: float = limits.TURN_SECONDS) -> list[list[int]]:
    """What is done in each turn of the event loop of what these clients ask for, if each thing takes so long."""
    now, done = [0.0], list[list[int]]([[]])
    turns = Turns(lambda: now[0])

    def act(number: int) -> None:
        now[0] += seconds
        done[-1].append(number)

    for client, number in asked:
        turns.take(client, partial(act, number))
    while sum(map(len, done)) < len(asked):
        done.append([])
        await asyncio.sleep(0)
    return done


@pytest.fixture
def asked() -> list[tuple[Client, int]]:
    """What four connections of one address and one of another ask for, in this order."""
    crowd = [(Client("attacker"), number) for number in range(4)]
    prometheus = Client("prometheus")
    return [*crowd[:3], (prometheus, 10), crowd[3], (prometheus, 11)]


def test_one_thing_of_each_address_is_done_in_a_turn_and_in_the_order_of_asking(
    asked: list[tuple[Client, int]],
) -> None:
    assert asyncio.run(done_by_turn(asked)) == [[0, 10], [1, 11], [2], [3]]


def test_what_takes_little_time_is_done_in_one_turn_in_rounds_of_the_addresses(asked: list[tuple[Client, int]]) -> None:
    assert asyncio.run(done_by_turn(asked, seconds=0.0)) == [[0, 10], [1, 11, 2, 3]]


def test_connections_of_one_address_that_ask_for_several_things_take_turns() -> None:
    one, other = Client("x"), Client("x")
    asked = [(one, 0), (one, 1), (one, 2), (one, 3), (other, 10), (other, 11)]
    assert asyncio.run(done_by_turn(asked)) == [[0], [1], [10], [2], [11], [3]]


def test_what_a_connection_has_queued_is_dropped_when_it_closes() -> None:
    async def closed() -> tuple[list[str], bool, bool]:
        turns, done = Turns(), list[str]()
        leaves, stays = Client("x"), Client("x")
        for client, name in ((leaves, "first"), (leaves, "left"), (stays, "stays"), (leaves, "left too")):
            turns.take(client, partial(done.append, name))
        turns.forget(leaves)
        turns.forget(Client("y"))
        has = turns.has(leaves), turns.has(stays)
        await asyncio.sleep(0)
        return done, *has

    assert asyncio.run(closed()) == (["first", "stays"], False, True)


def test_an_action_may_close_the_connection_whose_turn_is_next() -> None:
    async def closing() -> list[str]:
        turns, done = Turns(), list[str]()
        one, other, third = Client("x"), Client("y"), Client("z")
        for client in (one, other, third):
            turns.take(client, partial(done.append, client.address))
        turns.take(one, lambda: turns.forget(other))
        turns.take(other, partial(done.append, "never"))
        turns.take(third, partial(done.append, "last"))
        await asyncio.sleep(0)
        return done

    assert asyncio.run(closing()) == ["x", "y", "z", "last"]


def test_an_address_that_asks_again_in_a_later_turn_need_not_wait() -> None:
    async def later() -> tuple[bool, bool, bool]:
        turns, client = Turns(), Client("x")
        first = turns.take(client, lambda: None)
        await asyncio.sleep(0)
        second, third = (turns.take(client, lambda: None) for _ in range(2))
        return first, second, third

    assert asyncio.run(later()) == (True, True, False)


def test_a_mistake_in_one_turn_keeps_nobody_else_waiting() -> None:
    async def mistaken() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns, came = Turns(), [asyncio.Event() for _ in range(3)]
        clients = [Client(address) for address in ("x", "y", "z")]
        for client in clients:
            turns.take(client, lambda: None)
        turns.take(clients[0], lambda: 1 / 0)
        for client, event in zip(clients, came, strict=True):
            turns.take(client, event.set)
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in came)), 10)

    asyncio.run(mistaken())


def test_clients_that_are_cut_off_cost_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    told = RateLimitedLog(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        told.note("idle")
    assert [record.getMessage() for record in caplog.records] == [
        "clients cut off: 1 (idle)",
        "clients cut off: 3 (idle)",
    ]
