"""The listening sockets: new connections are queued by client address, on one port."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from rankscope_exporter.web import limits, listeners
from rankscope_exporter.web.listeners import listening


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


def test_it_listens_on_ipv4_ipv6_and_host_names(opened: ExitStack) -> None:
    for host, source in (("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1")):
        sockets = opened.enter_context(listening(host, 0))
        assert len({one.getsockname()[1] for one in sockets}) == 1
        family = socket.AF_INET6 if host == "::1" else sockets[0].family
        connect(opened, sockets[0].getsockname()[1], "::1" if family == socket.AF_INET6 else source)
        assert len(ready(sockets)) == 1


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
