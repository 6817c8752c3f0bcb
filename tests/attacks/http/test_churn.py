"""Attack: connections opened and closed faster than they are served, to fill memory or to block scrapes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import pytest
from testing.stack import wait_for
from tests.attacks.http.clients import TIMEOUT, scrape, server
from validation.siege import clients
from validation.siege.target import Seen, Target

from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import FairQueue
from rankscope_exporter.web.protocol import BoundedProtocol

ACTS = 4  # each opens hundreds of connections
LARGEST_READ = 256_000  # bytes that uvloop reads at once
Act = Callable[[Target, Seen], Generator[None]]


@contextmanager
def attack(act: Act, port: int) -> Iterator[Seen]:
    """Run the first acts of an attack, and close its connections at the end of the context."""
    seen = Seen()
    with closing(act(Target("", "", "127.0.0.1", port, "127.0.0.1"), seen)) as acts:
        for _ in islice(acts, ACTS):
            pass
        yield seen


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[FairQueue]:
    """Return the list of queues that servers have made."""
    made: list[FairQueue] = []
    init = FairQueue.__init__

    def record(self: FairQueue) -> None:
        init(self)
        made.append(self)

    monkeypatch.setattr(FairQueue, "__init__", record)
    return made


def protocols() -> list[BoundedProtocol]:
    return [instance for instance in gc.get_objects() if type(instance) is BoundedProtocol]


@pytest.mark.parametrize("act", [clients.churn, clients.dropped])
def test_only_data_of_open_connections_is_queued(
    act: Act, queues: list[FairQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[int] = []
    unparsed: list[int] = []
    received = BoundedProtocol.data_received

    def receive_and_count(self: BoundedProtocol, data: bytes) -> None:
        received(self, data)
        queued.append(len(queues[0]))
        unparsed.append(len(self._unparsed))

    monkeypatch.setattr(BoundedProtocol, "data_received", receive_and_count)
    with server() as (port, _):
        with attack(act, port) as seen:
            assert sum(seen.values()) > limits.CONNECTIONS
            assert scrape(port) == 200
        assert max(queued, default=0) <= 2 * limits.CONNECTIONS  # a request and a page for each connection
        assert max(unparsed, default=0) <= LARGEST_READ
        assert wait_for(lambda: len(queues[0]) == 0, TIMEOUT)


@pytest.mark.parametrize("act", [clients.churn, clients.dropped])
def test_closed_connections_are_freed(act: Act) -> None:
    before = len(protocols())
    with server() as (port, other):
        with attack(act, port):
            assert scrape(port) == 200
            assert scrape(other, host="::1") == 200
        assert wait_for(lambda: len(protocols()) <= before + 1, TIMEOUT)


def test_incomplete_handshakes_do_not_block_others(
    serve: Callable[[Path], int], web_config: Callable[..., Path], authority: object, queues: list[FairQueue]
) -> None:
    port = serve(web_config(tls_server_config={"cert_file": "server.pem", "key_file": "server.key"}))
    with attack(clients.handshakes, port) as seen:
        assert seen["begun"] > limits.CONNECTIONS
        assert wait_for(lambda: len(queues[0]) == 0, TIMEOUT)
