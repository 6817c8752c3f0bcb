"""The listening sockets: new connections are queued by client address, on one port."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from rankscope_exporter.web import limits, listeners
from rankscope_exporter.web.listeners import address_name, listening


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(opened: ExitStack, port: int, source: str) -> None:
    """Connect to this machine from the address `source`."""
    host = "::1" if ":" in source else "127.0.0.1"
    opened.enter_context(socket.create_connection((host, port), timeout=10, source_address=(source, 0)))


def ready(sockets: Sequence[socket.socket]) -> list[int]:
    """Return the indices of the sockets with a waiting connection."""
    found, _, _ = select.select(sockets, (), (), 0)
    return [number for number, one in enumerate(sockets) if one in found]


def test_connections_of_one_address_share_a_queue(opened: ExitStack) -> None:
    sockets = opened.enter_context(listening("", 0))
    port = sockets[0].getsockname()[1]
    for source in ("127.0.0.1", "127.0.0.1", "127.3.2.1", "127.255.0.9"):
        connect(opened, port, source)
    assert len(ready(sockets)) == 1


def test_a_full_queue_does_not_block_other_addresses(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((1, 3 << 24, 5 << 24, 7 << 24, 9 << 24))  # fixed: random hashes may give both the same queue
    monkeypatch.setattr(listeners.secrets, "randbits", lambda _: next(numbers))
    monkeypatch.setattr(limits, "BACKLOG", 1)
    for _ in range(5):
        sockets = opened.enter_context(listening("", 0))
        port = sockets[0].getsockname()[1]
        connect(opened, port, "127.0.0.1")
        connect(opened, port, "::1")
        if len(ready(sockets)) == 2:
            return
    pytest.fail("both addresses have the same queue with every hash")


def test_responses_are_sent_without_delay(opened: ExitStack) -> None:
    """Check TCP_NODELAY: without it, a body on a persistent connection waits 40 ms for its headers' acknowledgment."""
    sockets = opened.enter_context(listening("127.0.0.1", 0))
    connect(opened, sockets[0].getsockname()[1], "127.0.0.1")
    accepted = opened.enter_context(sockets[ready(sockets)[0]].accept()[0])
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


V4, OTHER_V4, V6 = ("127.0.0.1", 0), ("127.0.0.2", 0), ("::1", 0, 0, 0)
NOT_HERE, NOT_HERE_V6 = ("192.0.2.1", 0), ("2001:db8::1", 0, 0, 0)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives each name these addresses."""
    getaddrinfo = socket.getaddrinfo

    def to(*addresses: tuple[Any, ...]) -> None:
        def found(_host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
            return [
                (*getaddrinfo(address[0], port, **options)[0][:4], (address[0], port, *address[2:]))
                for address in addresses
            ]

        monkeypatch.setattr(listeners.socket, "getaddrinfo", found)

    return to


def hosts(sockets: Sequence[socket.socket]) -> list[str]:
    """Return the addresses of the sockets, which have one port."""
    assert len({one.getsockname()[1] for one in sockets}) == 1
    return [*dict.fromkeys(one.getsockname()[0] for one in sockets)]


def at_any_port(opened: ExitStack, host: str) -> list[socket.socket]:
    """Listen on a port that is free at each address of the host."""
    for _ in range(20):
        with suppress(OSError):
            return opened.enter_context(listening(host, 0))
    return opened.enter_context(listening(host, 0))


@pytest.mark.parametrize(("host", "source"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1")])
def test_it_listens_on_ipv4_ipv6_and_host_names(opened: ExitStack, host: str, source: str) -> None:
    sockets = at_any_port(opened, host)
    connect(opened, sockets[0].getsockname()[1], source)
    assert len(ready(sockets)) == 1


@pytest.mark.parametrize("addresses", [(V6, V4), (V4, V6), (V4, OTHER_V4, V6), (V4, V6, V4, V6)])
def test_it_listens_on_each_address_of_a_name(
    opened: ExitStack,
    resolve: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    addresses: tuple[tuple[Any, ...], ...],
) -> None:
    resolve(*addresses)
    sockets = at_any_port(opened, "gpu01")
    monkeypatch.undo()
    assert hosts(sockets) == [*dict.fromkeys(address[0] for address in addresses)]
    assert len(sockets) <= limits.ACCEPT_QUEUES
    for host in hosts(sockets):
        opened.enter_context(socket.create_connection((host, sockets[0].getsockname()[1]), timeout=10))
    assert len(ready(sockets)) == len(hosts(sockets))


@pytest.mark.parametrize("addresses", [(NOT_HERE_V6, V4), (V4, NOT_HERE), (NOT_HERE, V4, NOT_HERE_V6)])
def test_it_leaves_out_an_address_that_the_machine_does_not_have(
    opened: ExitStack,
    resolve: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    addresses: tuple[tuple[Any, ...], ...],
) -> None:
    resolve(*addresses)
    assert hosts(at_any_port(opened, "gpu01")) == ["127.0.0.1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (len(addresses) - 1)
    assert "not listening on" in caplog.text
    assert "Cannot assign requested address" in caplog.text


def test_it_listens_on_ipv4_if_the_kernel_has_no_ipv6(
    opened: ExitStack, resolve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = socket.socket

    def without_ipv6(family: int = -1, *more: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *more, **options)

    resolve(V6, V4)
    monkeypatch.setattr(listeners.socket, "socket", without_ipv6)
    assert hosts(at_any_port(opened, "localhost")) == ["127.0.0.1"]


def test_a_name_without_an_address_of_this_machine_is_an_error_with_the_address(
    opened: ExitStack, resolve: Callable[..., None]
) -> None:
    resolve(NOT_HERE_V6, NOT_HERE)
    with pytest.raises(OSError, match=r"Cannot assign requested address: '\[2001:db8::1\]:7'"):
        opened.enter_context(listening("gpu01", 7))


@pytest.mark.parametrize("taken", [V4, V6])
def test_a_port_in_use_at_one_address_of_a_name_is_an_error_with_the_address(
    opened: ExitStack, resolve: Callable[..., None], taken: tuple[Any, ...]
) -> None:
    family = socket.AF_INET6 if taken is V6 else socket.AF_INET
    resolve(V4, V6)
    with ExitStack() as closed:
        port = at_any_port(closed, "localhost")[0].getsockname()[1]
    opened.enter_context(socket.create_server((taken[0], port), family=family))
    with pytest.raises(OSError, match="Address already in use") as raised:
        opened.enter_context(listening("localhost", port))
    assert raised.value.filename == address_name((taken[0], port))


def test_any_ipv6_address_is_any_ipv4_address_too(opened: ExitStack) -> None:
    sockets = opened.enter_context(listening("::", 0))
    for source in ("127.0.0.1", "::1"):
        connect(opened, sockets[0].getsockname()[1], source)
    ipv4 = opened.enter_context(listening("0.0.0.0", 0))
    with pytest.raises(ConnectionRefusedError):
        connect(opened, ipv4[0].getsockname()[1], "::1")


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_in_use_is_an_error(opened: ExitStack, host: str) -> None:
    sockets = opened.enter_context(listening(host, 0))
    with pytest.raises(OSError, match="Address already in use"):
        opened.enter_context(listening(host, sockets[0].getsockname()[1]))


def test_it_listens_if_the_kernel_rejects_the_program(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "ATTACH_PROGRAM", 9999)
    sockets = opened.enter_context(listening("127.0.0.1", 0))
    connect(opened, sockets[0].getsockname()[1], "127.0.0.1")
    assert len(ready(sockets)) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_few_file_descriptors_mean_few_queues(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64, 64))
    assert len(opened.enter_context(listening("127.0.0.1", 0))) == 4
