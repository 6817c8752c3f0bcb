"""Every connection that the exporter's server has, and which of them gives way where there are too many.

Whoever comes is let in, and a connection of the address that has the most is closed for it: so somebody who holds all
that there are loses his own, and not the scrape of another address. Of one address the one goes that has done the same
for longest: waited for a request's end, for its answer to be read, or for another request. So a scrape from an
attacker's address gets in as well: it is over long before a hundred others have come after it.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from rankscope_exporter.web import limits

logger = logging.getLogger(__name__)


class Page:
    """The bytes of one answer, which several connections may be sending."""

    def __init__(self, body: bytes) -> None:
        self.body = body


class Connection(Protocol):
    """What is asked of a connection here."""

    address: str
    """Whose it is, as `whose` says."""
    since: float
    """When it began to do what it does now."""
    is_lost: bool
    """Whether the client has left."""

    def cut_off(self, reason: str) -> None:
        """Close it at once, whatever it has not sent."""


class Connections:
    """Those that there are now. Not for several threads: all are served by one event loop."""

    def __init__(self, limit: int | None = None, page_bytes: int = limits.PAGE_BYTES) -> None:
        self._limit = limit or limits.connections()
        self._page_bytes = page_bytes
        self._open: dict[Connection, None] = {}  # a set in the order in which they came
        self._sending: dict[Connection, Page] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Let it in."""
        self._open[connection] = None
        while len(self._open) > self._limit:
            self._cut_off(_gives_way(self._open, connection), "too many connections")

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self._open.pop(connection, None)
        self._sending.pop(connection, None)

    def sends(self, connection: Connection, page: Page) -> None:
        """It begins to send a page."""
        self._sending[connection] = page
        while self.held_bytes > self._page_bytes and len(self._sending) > 1:
            self._cut_off(_gives_way(self._sending, connection), "too much that its client did not read")

    def has_sent(self, connection: Connection) -> None:
        """It holds no page any more."""
        self._sending.pop(connection, None)

    @property
    def held_bytes(self) -> int:
        """Of pages that are being sent, each counted once."""
        return sum(len(page.body) for page in set(self._sending.values()))

    def _cut_off(self, connection: Connection, reason: str) -> None:
        self.remove(connection)
        connection.cut_off(reason)


def _gives_way(among: Collection[Connection], newest: Connection) -> Connection:
    crowd = Counter(connection.address for connection in among)
    others = (connection for connection in among if connection is not newest)
    return max(others, key=lambda one: (crowd[one.address], -one.since))


def whose(host: str) -> str:
    """The part of the network that `host` is in and that one owner surely has: it cannot make itself many.

    Of IPv6 that is a /64; of IPv4 the address, but all of 127.0.0.0/8 is this machine.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(address), 64), strict=False))
        address = address.ipv4_mapped
    return "127.0.0.0/8" if address.is_loopback else str(address)


class Told:
    """A line in the log about what was done to clients, at the most once a minute however many they are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._at = -limits.TOLD_EVERY

    def note(self, reason: str) -> None:
        """One more client for this reason."""
        self._counts[reason] += 1
        if self._clock() - self._at >= limits.TOLD_EVERY:
            self._at = self._clock()
            logger.warning("clients cut off: %s", ", ".join(f"{n} ({why})" for why, n in self._counts.items()))
            self._counts.clear()
