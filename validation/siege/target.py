"""An attacker's knowledge of the node, and the users on it."""

from __future__ import annotations

import ssl
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Self, TypeVar

VICTIM, ATTACKER, EXPORTER, LONG_NAMES_USER = 61_001, 61_002, 61_003, 61_004  # users without a name

RUN = "victim"
RANKS = 2
GPUS = 4
INSIDER = "fuzz", "right"
"""A user of the exporter's pages who attacks, with the name and password of validation/fuzz/requests.py."""

Seen = Counter[str]
"""The results of an attacker's acts, by kind."""
Thing = TypeVar("Thing")


class Held(deque[Thing]):
    """Things that an attacker has made: it removes the oldest ones beyond a number, and all when the context ends."""

    def __init__(self, remove: Callable[[Thing], object], most: float = inf, first: Iterable[Thing] = ()) -> None:
        super().__init__(first)
        self._remove, self._most = remove, most

    def hold(self, thing: Thing) -> Thing:
        """Add and return it."""
        self.append(thing)
        while len(self) > self._most:
            self._remove(self.popleft())
        return thing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self:
            self._remove(self.pop())


@dataclass(frozen=True)
class Target:
    """The node, as an attacker sees it."""

    run_dir: str
    """A directory that every user may write to."""
    closed_dir: str
    """Another directory that the exporter reads; it belongs to the attacker."""
    host: str
    port: int
    source: str
    """The source address of this attacker's connections."""
    tls: bool = False
    """Whether the port speaks TLS."""
    share: float = 0.0
    """The share of a CPU to use, for the control that attacks nothing."""


def any_server() -> ssl.SSLContext:
    """Return a client's context that trusts every server: here the server is attacked, not the client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
