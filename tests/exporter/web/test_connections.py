"""The choice of the connection to close at the limits, and the order in which queued actions run."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Connections, FairQueue, Page, RateLimitedLog, client_network


class Client:
    """A connection that records why it was closed."""

    def __init__(self, address: str, since: float = 0.0, *, is_pending: bool = False) -> None:
        self.address = address
        self.since = since
        self.is_lost = False
        self.is_pending = is_pending
        self.reasons: list[str] = []

    def cut_off(self, reason: str) -> None:
        self.reasons.append(reason)


def closed(clients: list[Client]) -> list[int]:
    return [number for number, client in enumerate(clients) if client.reasons]


def test_the_address_with_the_most_connections_loses_one() -> None:
    connections = Connections(limit=4)
    scrape, *attackers = clients = [Client("prometheus"), *(Client("attacker", number) for number in range(6))]
    for client in clients:
        connections.add(client)
    assert closed(attackers) == [0, 1, 2]
    assert not scrape.reasons
    assert len(connections) == 4


def test_the_connection_longest_in_its_state_is_closed() -> None:
    connections = Connections(limit=3)
    clients = [Client("x", since) for since in (5.0, 2.0, 1.0, 3.0, 4.0)]
    for client in clients:
        connections.add(client)
    assert closed(clients) == [1, 2]


def test_a_new_connection_is_always_accepted() -> None:
    connections = Connections(limit=2)
    clients = [Client("x", -number) for number in range(5)]
    for client in clients:
        connections.add(client)
    assert not clients[-1].reasons
    assert len(connections) == 2


def test_shared_pages_count_once_and_the_oldest_connection_of_the_largest_address_is_closed() -> None:
    connections = Connections(limit=100, page_bytes=300)
    shared = Page(b"x" * 100)
    clients = [*(Client("prometheus", number) for number in range(2)), *(Client("y", number) for number in range(5))]
    for client in clients[:2]:
        connections.start_sending(client, shared)
    assert connections.sending_bytes == 100
    for client in clients[2:]:
        connections.start_sending(client, Page(b"y" * 100))
    assert closed(clients) == [2, 3, 4]
    connections.end_sending(clients[5])
    assert connections.sending_bytes == 200


def test_a_page_above_the_limit_is_sent_to_one_client_at_a_time() -> None:
    connections = Connections(page_bytes=10)
    clients = [Client("x"), Client("y")]
    for client in clients:
        connections.start_sending(client, Page(b"x" * 100))
    assert closed(clients) == [0]


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
def test_addresses_of_one_machine_are_one_network(one: str, other: str, is_same: bool) -> None:
    assert (client_network(one) == client_network(other)) is is_same


@pytest.mark.parametrize(("descriptors", "connections"), [(64, 16), (256, 64), (1 << 20, limits.CONNECTIONS), (4, 2)])
def test_connections_use_a_fraction_of_the_file_descriptors(
    descriptors: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert limits.connections() == connections
    assert limits.connections() + limits.accept_queues() <= max(4, descriptors // 3)


def test_a_connection_that_waits_for_the_server_is_closed_last() -> None:
    connections = Connections(limit=3)
    scrape, *others = clients = [Client("x", 0.0, is_pending=True), *(Client("x", since) for since in (1.0, 2.0, 3.0))]
    for client in clients:
        connections.add(client)
    assert closed(others) == [0]
    assert not scrape.reasons
    for since in (4.0, 5.0):
        connections.add(Client("x", since, is_pending=True))
    assert closed(others) == [0, 1, 2]
    assert not scrape.reasons
    connections.add(Client("x", 6.0))
    assert scrape.reasons


async def run_by_iteration(
    actions: list[tuple[Client, int]], seconds: float = limits.ITERATION_SECONDS
) -> list[list[int]]:
    """Return the actions that run in each iteration of the event loop if each takes `seconds`."""
    now, done = [0.0], list[list[int]]([[]])
    queue = FairQueue(lambda: now[0])

    def act(number: int) -> None:
        now[0] += seconds
        done[-1].append(number)

    for client, number in actions:
        queue.run_or_queue(client, partial(act, number))
    while sum(map(len, done)) < len(actions):
        done.append([])
        await asyncio.sleep(0)
    return done


@pytest.fixture
def actions() -> list[tuple[Client, int]]:
    """Return actions of four connections of one address and of one connection of another, in order of arrival."""
    attackers = [(Client("attacker"), number) for number in range(4)]
    prometheus = Client("prometheus")
    return [*attackers[:3], (prometheus, 10), attackers[3], (prometheus, 11)]


def test_an_iteration_runs_one_action_of_each_address_in_order_of_arrival(actions: list[tuple[Client, int]]) -> None:
    assert asyncio.run(run_by_iteration(actions)) == [[0, 10], [1, 11], [2], [3]]


def test_an_iteration_runs_several_rounds_of_fast_actions(actions: list[tuple[Client, int]]) -> None:
    assert asyncio.run(run_by_iteration(actions, seconds=0.0)) == [[0, 10], [1, 11, 2, 3]]


def test_connections_of_one_address_take_turns() -> None:
    one, other = Client("x"), Client("x")
    actions = [(one, 0), (one, 1), (one, 2), (one, 3), (other, 10), (other, 11)]
    assert asyncio.run(run_by_iteration(actions)) == [[0], [1], [10], [2], [11], [3]]


def test_the_actions_of_a_closed_connection_are_dropped() -> None:
    async def scenario() -> tuple[list[str], bool, bool]:
        queue, done = FairQueue(), list[str]()
        leaves, stays = Client("x"), Client("x")
        for client, name in ((leaves, "first"), (leaves, "left"), (stays, "stays"), (leaves, "left too")):
            queue.run_or_queue(client, partial(done.append, name))
        queue.drop(leaves)
        queue.drop(Client("y"))
        is_queued = leaves in queue, stays in queue
        await asyncio.sleep(0)
        return done, *is_queued

    assert asyncio.run(scenario()) == (["first", "stays"], False, True)


def test_an_action_may_close_the_next_connection() -> None:
    async def scenario() -> list[str]:
        queue, done = FairQueue(), list[str]()
        one, other, third = Client("x"), Client("y"), Client("z")
        for client in (one, other, third):
            queue.run_or_queue(client, partial(done.append, client.address))
        queue.run_or_queue(one, lambda: queue.drop(other))
        queue.run_or_queue(other, partial(done.append, "never"))
        queue.run_or_queue(third, partial(done.append, "last"))
        await asyncio.sleep(0)
        return done

    assert asyncio.run(scenario()) == ["x", "y", "z", "last"]


def test_an_action_in_a_later_iteration_runs_at_once() -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        queue, client = FairQueue(), Client("x")
        first = queue.run_or_queue(client, lambda: None)
        await asyncio.sleep(0)
        second, third = (queue.run_or_queue(client, lambda: None) for _ in range(2))
        return first, second, third

    assert asyncio.run(scenario()) == (True, True, False)


class TestShareOfCpuTime:
    """An address that used more than its share of CPU time waits for the others."""

    def scenario(self, act: Callable[[FairQueue, list[float], list[str]], Awaitable[None]]) -> list[str]:
        """Return what ran in a queue of three addresses, two of which have used their whole burst."""

        async def run() -> list[str]:
            now, done = [0.0], list[str]()
            queue = FairQueue(lambda: now[0], lambda: used[0])
            used = [0.0]

            def compute() -> None:
                used[0] += limits.CPU_BURST * 1.01

            for address in ("attacker", "other attacker"):
                assert queue.run_or_queue(Client(address), compute)
            await asyncio.sleep(0)
            await act(queue, now, done)
            return done

        return asyncio.run(run())

    def test_it_waits_even_for_later_actions_of_the_others(self) -> None:
        async def act(queue: FairQueue, _: list[float], done: list[str]) -> None:
            for address in ("attacker", "prometheus"):
                queue.run_or_queue(Client(address), partial(done.append, address))
            assert done == ["prometheus"]
            await asyncio.sleep(0)

        assert self.scenario(act) == ["prometheus", "attacker"]

    def test_all_such_addresses_share_the_time_of_an_iteration(self) -> None:
        async def act(queue: FairQueue, now: list[float], done: list[str]) -> None:
            def slow(name: str) -> None:
                now[0] += limits.ITERATION_SECONDS
                done.append(name)

            for address in ("attacker", "attacker", "other attacker", "other attacker"):
                queue.run_or_queue(Client(address), partial(slow, address))
            for count in range(1, 5):
                await asyncio.sleep(0)
                assert len(done) == count

        assert self.scenario(act) == ["attacker", "other attacker"] * 2

    def test_after_a_while_it_runs_at_once_again(self) -> None:
        async def act(queue: FairQueue, now: list[float], done: list[str]) -> None:
            now[0] += limits.CPU_BURST / limits.CPU_SHARE
            assert queue.run_or_queue(Client("attacker"), partial(done.append, "attacker"))

        assert self.scenario(act) == ["attacker"]

    def test_the_times_of_addresses_that_left_are_forgotten(self) -> None:
        async def act(queue: FairQueue, now: list[float], _: list[str]) -> None:
            for number in range(limits.CONNECTIONS + 1):
                queue.run_or_queue(Client(str(number)), lambda: None)
            now[0] += 2 * limits.CPU_BURST / limits.CPU_SHARE
            await asyncio.sleep(0)
            assert not queue._paid_at

        self.scenario(act)


def test_an_exception_in_one_action_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        queue, events = FairQueue(), [asyncio.Event() for _ in range(3)]
        clients = [Client(address) for address in ("x", "y", "z")]
        for client in clients:
            queue.run_or_queue(client, lambda: None)
        queue.run_or_queue(clients[0], lambda: 1 / 0)
        for client, event in zip(clients, events, strict=True):
            queue.run_or_queue(client, event.set)
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 10)

    asyncio.run(scenario())


def test_closed_connections_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RateLimitedLog(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        log.count("idle")
    assert [record.getMessage() for record in caplog.records] == [
        "closed client connections: 1 (idle)",
        "closed client connections: 3 (idle)",
    ]
