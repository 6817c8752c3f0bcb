"""Attack: connections that come and go faster than they are served, to fill memory or to keep scrapes out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
from tests.attacks.http.clients import PATIENCE, scrape, server
from validation.siege import clients
from validation.siege.target import Seen, Target

from rankscope_exporter.web import limits
from rankscope_exporter.web.connections import Turns
from rankscope_exporter.web.protocol import BoundedProtocol

ACTS = 4  # some hundred connections each
LARGEST_READ = 256_000  # bytes that uvloop reads at once
Act = Callable[[Target, Seen], Iterator[None]]


@contextmanager
def attack(act: Act, port: int) -> Iterator[Seen]:
    """Makes some acts of an attack, and leaves when the context does."""
    seen = Seen()
    acts = act(Target("", "", "127.0.0.1", port, "127.0.0.1"), seen)
    for _ in islice(acts, ACTS):
        pass
    try:
        yield seen
    finally:
        acts.close()  # type: ignore[attr-defined]  # a generator


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """The queues of the servers that start."""
    made: list[Turns] = []
    init = Turns.__init__

    def remembered(self: Turns) -> None:
        init(self)
        made.append(self)

    monkeypatch.setattr(Turns, "__init__", remembered)
    return made


def protocols() -> list[BoundedProtocol]:
    return [one for one in gc.get_objects() if type(one) is BoundedProtocol]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("act", [clients.churn, clients.dropped])
def test_no_more_is_queued_than_open_connections_have_sent(
    act: Act, turns: list[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[int] = []
    unparsed: list[int] = []
    received = BoundedProtocol.data_received

    def counted(self: BoundedProtocol, data: bytes) -> None:
        received(self, data)
        queued.append(turns[0].queued)
        unparsed.append(len(self._unparsed))

    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    with server() as (port, _):
        with attack(act, port) as seen:
            assert sum(seen.values()) > limits.CONNECTIONS
            assert scrape(port) == 200
        assert max(queued, default=0) <= 2 * limits.CONNECTIONS  # of each a request and a page
        assert max(unparsed, default=0) <= LARGEST_READ
        assert eventually(lambda: turns[0].queued == 0)


@pytest.mark.parametrize("act", [clients.churn, clients.dropped])
def test_nothing_is_left_of_connections_that_have_left(act: Act) -> None:
    before = len(protocols())
    with server() as (port, other):
        with attack(act, port):
            assert scrape(port) == 200
            assert scrape(other, host="::1") == 200
        assert eventually(lambda: len(protocols()) <= before + 1)


def test_a_handshake_that_is_begun_takes_its_turn_and_others_get_in(
    serve: Callable[[Path], int], web_config: Callable[..., Path], authority: object, turns: list[Turns]
) -> None:
    port = serve(web_config(tls_server_config={"cert_file": "server.pem", "key_file": "server.key"}))
    with attack(clients.handshakes, port) as seen:
        assert seen["begun"] > limits.CONNECTIONS
        assert eventually(lambda: turns[0].queued == 0)
