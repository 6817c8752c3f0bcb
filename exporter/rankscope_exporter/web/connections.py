"""Every connection of the exporter's server, and which one is closed where there are too many.

Every new connection is accepted, and one of the address that has the most is closed for it: a client that holds all
that there are loses its own, and not the scrape of another address. Of one address it is the connection that has waited
longest for its client: for a request's end, for its answer to be read, or for another request. One that waits for the
server is closed only if all do. So a scrape from an attacker's address is answered as well.

Requests are handled in turns of the event loop, in rounds of one request of each address: hundreds of requests of one
address delay another address by one request, or by the time that a turn has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Protocol

from rankscope_exporter.web import limits

logger = logging.getLogger(__name__)

Action = Callable[[], None]


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

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the server and not for its client."""

    def cut_off(self, reason: str) -> None:
        """Close it at once, whatever it has not sent."""


class Connections:
    """Those that there are now. Not for several threads: all are served by one event loop."""

    def __init__(self, limit: int | None = None, page_bytes: int = limits.PAGE_BYTES) -> None:
        self._limit = limit or limits.connections()
        self._page_bytes = page_bytes
        self._open = _ConnectionsByAddress()
        self._sending = _ConnectionsByAddress()
        self._pages: dict[Connection, Page] = {}  # that these are sending

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Let it in, and cut off whoever gives way where there are more than the limit."""
        self._open.add(connection)
        while len(self._open) > self._limit:
            self._cut_off(self._open.gives_way(connection), "too many connections")

    def remove(self, connection: Connection) -> None:
        """Forget it, as it is closed, with the page that it was being sent."""
        self._open.remove(connection)
        self.has_sent(connection)

    def sends(self, connection: Connection, page: Page) -> None:
        """It begins to send a page."""
        self._sending.add(connection)
        self._pages[connection] = page
        while self.held_bytes > self._page_bytes and len(self._sending) > 1:
            self._cut_off(self._sending.gives_way(connection), "too much that its client did not read")

    def has_sent(self, connection: Connection) -> None:
        """It holds no page any more."""
        self._sending.remove(connection)
        self._pages.pop(connection, None)

    @property
    def held_bytes(self) -> int:
        """Of pages that are being sent, each counted once."""
        return sum(len(page.body) for page in set(self._pages.values()))

    def _cut_off(self, connection: Connection, reason: str) -> None:
        self.remove(connection)
        connection.cut_off(reason)


class Turns:
    """Actions for connections, run in rounds: one for each address in a round, in the order of arrival.

    A turn of the event loop has at least one round, and more until its time is used up. What a connection has queued is
    dropped when it closes, so a client that opens connections and leaves holds no memory.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._queues: dict[str, dict[Connection, deque[Action]]] = {}  # of addresses that had this turn

    def take(self, connection: Connection, action: Action) -> bool:
        """Run the action now and return True, or queue it if this address has had its turn."""
        queue = self._queues.get(connection.address)
        if queue is not None:
            queue.setdefault(connection, deque()).append(action)
            return False
        if not self._queues:
            asyncio.get_running_loop().call_soon(self._next)
        self._queues[connection.address] = {}
        action()
        return True

    @property
    def queued(self) -> int:
        """How many actions wait."""
        return sum(len(actions) for queue in self._queues.values() for actions in queue.values())

    def has(self, connection: Connection) -> bool:
        """Return whether an action of this connection is queued."""
        return connection in self._queues.get(connection.address, ())

    def forget(self, connection: Connection) -> None:
        """Drop what the connection has queued."""
        self._queues.get(connection.address, {}).pop(connection, None)

    def _next(self) -> None:
        self._queues = {address: queue for address, queue in self._queues.items() if queue}
        if self._queues:
            asyncio.get_running_loop().call_soon(self._next)
        ends = self._clock() + limits.TURN_SECONDS
        while queues := [queue for queue in self._queues.values() if queue]:
            for queue in queues:
                _run_first(queue)
            if self._clock() >= ends:
                break


def _run_first(queue: dict[Connection, deque[Action]]) -> None:
    """Run one action of the first connection, which then goes to the end of the queue if it has more."""
    if not queue:  # an action before this one has closed the last connection
        return
    connection = next(iter(queue))
    actions = queue.pop(connection)
    action = actions.popleft()
    if actions:
        queue[connection] = actions
    action()


class _ConnectionsByAddress:
    """Connections by their address. To find who gives way costs little: it is done for each that an attacker opens."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Connection, None]] = {}  # sets in the order in which they came
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        """It is one of them."""
        crowd = self._of.setdefault(connection.address, {})
        self._count += connection not in crowd
        crowd[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is none of them, and perhaps never was."""
        crowd = self._of.get(connection.address, {})
        if connection in crowd:
            del crowd[connection]
            self._count -= 1
            if not crowd:
                del self._of[connection.address]

    def gives_way(self, newest: Connection) -> Connection:
        """One of the largest crowd, not the newest."""
        most = max(map(len, self._of.values()))
        crowded = chain.from_iterable(crowd for crowd in self._of.values() if len(crowd) == most)
        return min((one for one in crowded if one is not newest), key=attrgetter("is_pending", "since"))


@lru_cache(maxsize=1024)  # an attacker's are a few, and come hundreds of times a second
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


class RateLimitedLog:
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
