"""The states that the sampler can be in: what it has been asked to do, and its connection to the driver."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What the sampler does, by what it was asked to."""

    STARTING = "not every GPU has been asked since the start"
    SAMPLING = "every GPU has been asked: a scrape misses nothing that is there"
    RELEASED = "the handles are given back on request"
    RESUMING = "they are taken again, and not every GPU has been asked since"


@dataclass
class Entered:
    """The phase that was entered last: each but SAMPLING, which STARTING and RESUMING come to by what is read."""

    phase: Phase
    since: float
    """Monotonic seconds, as is `until`."""
    until: float = math.inf
    """Of RELEASED: when the handles are taken again also if nobody asks for it."""
    has_looked: bool = False
    """Whether there was a look at the driver since."""


class Connection(Enum):
    """To the driver. Whether it is open and whether the driver has answered are two things."""

    ABSENT = "closed, and what was answered counts no more"
    SILENT = "open, and the driver has not answered yet or does not any more"
    ANSWERING = "open, and the driver has answered"
    RECONNECTING = "closed to be opened anew, and what was answered counts until it is stale"

    @property
    def is_open(self) -> bool:
        """Whether the driver is connected."""
        return self in (Connection.SILENT, Connection.ANSWERING)

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer that counts, unless it is stale."""
        return self in (Connection.ANSWERING, Connection.RECONNECTING)

    def opened(self) -> Connection:
        """The state after the driver was connected."""
        return {Connection.ABSENT: Connection.SILENT, Connection.RECONNECTING: Connection.ANSWERING}.get(self, self)

    def closed(self) -> Connection:
        """The state after the driver was closed: what it has answered still counts."""
        return {Connection.SILENT: Connection.ABSENT, Connection.ANSWERING: Connection.RECONNECTING}.get(self, self)

    def silenced(self) -> Connection:
        """The state after the driver has failed to answer, or when what it answered is to be forgotten."""
        return {Connection.ANSWERING: Connection.SILENT, Connection.RECONNECTING: Connection.ABSENT}.get(self, self)
