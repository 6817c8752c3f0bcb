"""The server's connections: which one to close if there are too many, and which request to handle next.

Each new connection is accepted. At the limit, a connection of the address with the most connections is closed for it:
a client that opens too many loses its own. Of that address, the connection is closed that has waited longest for its
client (to complete a request, read a response or send another request). One that waits for the server is closed only if
all do, so a scrape from an attacker's address is answered, too.

Requests are handled in rounds, one of each address in a round. Hundreds of requests of one address delay another
address by one request, or by the time that an iteration of the event loop has for requests.
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
    """The body of a response, which several connections may be sending."""

    def __init__(self, body: bytes) -> None:
        self.body = body


class Connection(Protocol):
    """The part of a connection that this module uses."""

    address: str
    """The client's network, from `client_network`."""
    since: float
    """Start time of the connection's current state."""
    is_lost: bool
    """True once the connection is closed."""

    @property
    def is_pending(self) -> bool:
        """Return whether it waits for the server, not for its client."""

    def cut_off(self, reason: str) -> None:
        """Close it at once and discard unsent data."""


class Connections:
    """The open connections. Not thread-safe: one event loop serves all of them."""

    def __init__(self, limit: int | None = None, page_bytes: int | None = None) -> None:
        self._limit = limit or limits.connections()
        self._page_bytes = page_bytes or limits.PAGE_BYTES
        self._open = _ConnectionsByAddress()
        self._sending = _ConnectionsByAddress()
        self._pages: dict[Connection, Page] = {}  # the page that each connection is sending

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Add a new connection; close another one if there are more than the limit."""
        self._open.add(connection)
        while len(self._open) > self._limit:
            self._cut_off(self._open.choose_to_close(connection), "too many connections")

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection, and the page that it was sending."""
        self._open.remove(connection)
        self.end_sending(connection)

    def start_sending(self, connection: Connection, page: Page) -> None:
        """Record that the connection sends a page; close others if the pages exceed the limit."""
        self._sending.add(connection)
        self._pages[connection] = page
        while self.sending_bytes > self._page_bytes and len(self._sending) > 1:
            self._cut_off(self._sending.choose_to_close(connection), "too many unread responses")

    def end_sending(self, connection: Connection) -> None:
        """Record that the connection sends no page."""
        self._sending.remove(connection)
        self._pages.pop(connection, None)

    @property
    def sending_bytes(self) -> int:
        """Size of the pages that are being sent, each counted once."""
        return sum(len(page.body) for page in set(self._pages.values()))

    def _cut_off(self, connection: Connection, reason: str) -> None:
        self.remove(connection)
        connection.cut_off(reason)


class FairQueue:
    """Queued actions of connections, run in rounds: one action of each address in a round, in order of arrival.

    An iteration of the event loop runs at least one action of each address that is within its share of CPU time. The
    others take turns in the rest of the iteration's time. The actions of a connection are dropped when it closes, so a
    client that opens and closes connections takes no memory.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._queues: dict[str, dict[Connection, deque[Action]]] = {}  # of addresses served in this iteration
        self._paid_at: dict[str, float] = {}  # when the address's share has made up for the CPU time that it used

    def run_or_queue(self, connection: Connection, action: Action) -> bool:
        """Run the action and return True, or queue it if its address was just served or exceeds its share."""
        address, is_scheduled = connection.address, bool(self._queues)
        is_first = address not in self._queues
        queue = self._queues.setdefault(address, {})
        queue.setdefault(connection, deque()).append(action)
        if not is_scheduled:
            asyncio.get_running_loop().call_soon(self._run_rounds)
        if is_first and self._is_within_share(address):
            self._run_first(address)
            return True
        return False

    def __len__(self) -> int:
        return sum(len(actions) for queue in self._queues.values() for actions in queue.values())

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._queues.get(connection.address, ())

    def drop(self, connection: Connection) -> None:
        """Remove the connection's queued actions."""
        self._queues.get(connection.address, {}).pop(connection, None)

    def _run_rounds(self) -> None:
        self._queues = {address: queue for address, queue in self._queues.items() if queue}
        if self._queues:
            asyncio.get_running_loop().call_soon(self._run_rounds)
        if len(self._paid_at) > limits.CONNECTIONS:
            self._paid_at = {address: at for address, at in self._paid_at.items() if at > self._clock()}
        deadline = self._clock() + limits.ITERATION_SECONDS
        served = [address for address in self._queues if self._is_within_share(address)]
        for address in served:
            self._run_first(address)
        while waiting := [address for address, queue in self._queues.items() if queue]:
            for address in waiting:
                if served and self._clock() >= deadline:
                    return
                served.append(address)
                self._queues[address] = self._queues.pop(address)  # the last in the next iteration
                self._run_first(address)

    def _is_within_share(self, address: str) -> bool:
        return self._paid_at.get(address, 0.0) <= self._clock() + limits.CPU_BURST / limits.CPU_SHARE

    def _run_first(self, address: str) -> None:
        """Run one action of the address's first connection, and move the connection to the end if it has more."""
        queue = self._queues[address]
        if not queue:  # an earlier action has closed the last connection
            return
        connection = next(iter(queue))
        actions = queue.pop(connection)
        action = actions.popleft()
        if actions:
            queue[connection] = actions
        began = self._cpu_clock()
        try:
            action()
        finally:
            self._charge(address, self._cpu_clock() - began)

    def _charge(self, address: str, seconds: float) -> None:
        now = self._clock()
        self._paid_at[address] = max(now, self._paid_at.get(address, now)) + seconds / limits.CPU_SHARE


class _ConnectionsByAddress:
    """Connections by address. Choosing one to close is cheap: it happens for each connection that an attacker opens."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Connection, None]] = {}  # ordered sets
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        """Add the connection if it is not there."""
        group = self._by_address.setdefault(connection.address, {})
        self._count += connection not in group
        group[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove the connection if it is there."""
        group = self._by_address.get(connection.address, {})
        if connection in group:
            del group[connection]
            self._count -= 1
            if not group:
                del self._by_address[connection.address]

    def choose_to_close(self, newest: Connection) -> Connection:
        """Return a connection of the address with the most connections, but not the newest."""
        most = max(map(len, self._by_address.values()))
        candidates = chain.from_iterable(group for group in self._by_address.values() if len(group) == most)
        return min((one for one in candidates if one is not newest), key=attrgetter("is_pending", "since"))


@lru_cache(maxsize=1024)  # an attacker has few addresses and connects hundreds of times a second
def client_network(host: str) -> str:
    """Return the network of `host` that has one owner, so that a client cannot pretend to be many.

    For IPv6 that is the /64. For IPv4 it is the address, or 127.0.0.0/8 for this machine.
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
    """Logs closed client connections by reason, at most one line a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at = -limits.LOG_INTERVAL

    def count(self, reason: str) -> None:
        """Count one connection closed for this reason, and log the counts if it is time."""
        self._counts[reason] += 1
        if self._clock() - self._logged_at >= limits.LOG_INTERVAL:
            self._logged_at = self._clock()
            counts = ", ".join(f"{count} ({reason})" for reason, count in self._counts.items())
            logger.warning("closed client connections: %s", counts)
            self._counts.clear()
