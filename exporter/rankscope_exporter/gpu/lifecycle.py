"""States of the sampler: its phase and its connection to the driver."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Phase of the sampler, according to the requests it received."""

    STARTING = "some GPUs have not been read since the start"
    SAMPLING = "every GPU has been read: a scrape is complete"
    RELEASED = "the handles are released on request"
    RESUMING = "the handles are reacquired, and some GPUs have not been read since"


@dataclass
class PhaseEntry:
    """The phase that was entered last. SAMPLING is never entered: STARTING and RESUMING become it after all reads."""

    phase: Phase
    since: float
    """Monotonic seconds, like `until`."""
    until: float = math.inf
    """When RELEASED ends without a request to resume."""
    has_supervised: bool = False
    """True if the driver has been checked since."""


class Connection(Enum):
    """Connection to the driver: whether it is open, and whether the driver has responded."""

    ABSENT = "closed, without a valid response"
    SILENT = "open, without a valid response"
    ANSWERING = "open, and the driver has responded"
    RECONNECTING = "closed before a reconnect; the last response is valid until it is stale"

    @property
    def is_open(self) -> bool:
        """True if the driver is connected."""
        return self in (Connection.SILENT, Connection.ANSWERING)

    @property
    def has_answered(self) -> bool:
        """True if there is a valid response, which may be stale."""
        return self in (Connection.ANSWERING, Connection.RECONNECTING)

    def opened(self) -> Connection:
        """Return the state after the driver is connected."""
        return {Connection.ABSENT: Connection.SILENT, Connection.RECONNECTING: Connection.ANSWERING}.get(self, self)

    def closed(self) -> Connection:
        """Return the state after the driver is closed; its last response stays valid."""
        return {Connection.SILENT: Connection.ABSENT, Connection.ANSWERING: Connection.RECONNECTING}.get(self, self)

    def silenced(self) -> Connection:
        """Return the state after the driver fails to respond, or after its last response becomes invalid."""
        return {Connection.ANSWERING: Connection.SILENT, Connection.RECONNECTING: Connection.ABSENT}.get(self, self)
