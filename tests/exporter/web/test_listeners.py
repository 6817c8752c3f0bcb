"""The sockets that listen: one queue of new connections for each address, and one port for all of them."""

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
    """Connect from this address to the same machine."""
    host = "::1" if ":" in source else "127.0.0.1"
    opened.enter_context(socket.create_connection((host, port), timeout=10, source_address=(source, 0)))


def ready(sockets: Sequence[socket.socket]) -> list[int]:
    """The numbers of the sockets that a connection waits at."""
    found, _, _ = select.select(sockets, (), (), 0)
    return [number for number, one in enumerate(sockets) if one in found]


def test_connections_of_one_address_wait_in_one_queue(opened: ExitStack) -> None:
    sockets = opened.enter_context(listening("", 0))
    port = sockets[0].getsockname()[1]
    for source in ("127.0.0.1", "127.0.0.1", "127.3.2.1", "127.255.0.9"):
        connect(opened, port, source)
    assert len(ready(sockets)) == 1


def test_a_full_queue_of_one_address_keeps_no_other_from_connecting(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(
        (1, 3 << 24, 5 << 24, 7 << 24, 9 << 24)
    )  # the hash has to tell the two apart: chance would not always
    monkeypatch.setattr(listeners.secrets, "randbits", lambda _: next(numbers))
    monkeypatch.setattr(limits, "WAITING", 1)
    for _ in range(5):
        sockets = opened.enter_context(listening("", 0))
        port = sockets[0].getsockname()[1]
        connect(opened, port, "127.0.0.1")
        connect(opened, port, "::1")
        if len(ready(sockets)) == 2:
            return
    pytest.fail("both addresses have the same queue whatever the hash")


def test_answers_leave_at_once(opened: ExitStack) -> None:
    """With Nagle's algorithm a body waits 40 ms for its headers' acknowledgement on a connection that is kept."""
    sockets = opened.enter_context(listening("127.0.0.1", 0))
    connect(opened, sockets[0].getsockname()[1], "127.0.0.1")
    accepted = opened.enter_context(sockets[ready(sockets)[0]].accept()[0])
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_each_family_and_a_host_can_be_listened_on(opened: ExitStack) -> None:
    for host, source in (("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1")):
        sockets = opened.enter_context(listening(host, 0))
        assert len({one.getsockname()[1] for one in sockets}) == 1
        family = socket.AF_INET6 if host == "::1" else sockets[0].family
        connect(opened, sockets[0].getsockname()[1], "::1" if family == socket.AF_INET6 else source)
        assert len(ready(sockets)) == 1


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_that_another_process_listens_on_is_an_error(opened: ExitStack, host: str) -> None:
    sockets = opened.enter_context(listening(host, 0))
    with pytest.raises(OSError, match="Address already in use"):
        opened.enter_context(listening(host, sockets[0].getsockname()[1]))


def test_where_the_kernel_takes_no_program_it_listens_all_the_same(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "ATTACH_PROGRAM", 9999)
    sockets = opened.enter_context(listening("127.0.0.1", 0))
    connect(opened, sockets[0].getsockname()[1], "127.0.0.1")
    assert len(ready(sockets)) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_few_descriptors_are_few_queues(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64, 64))
    assert len(opened.enter_context(listening("127.0.0.1", 0))) == 4
