"""Network ports: what is wrong with one, by its counters over a minute and by the ports that are like it.

down     it was active, and is not, or its link went down in the window
rate     it is slower than most ports of the same board, and carries as much as they do: an adapter for storage,
         whose rate may be lower on purpose, carries less
errors   errors of the link, and retransmissions, at least `ERRORS` a second and ten times its peers' median
drops    packets that the node drops: at least `DROPS` a second and `DROPPED_RATIO` of all
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

ERRORS = 10.0
"""A second. InfiniBand allows a bit error rate of 1e-12 (IBTA specification, volume 2): 0.4 a second at 400 Gb/s."""
ERRORS_OF_PEERS = 10.0
HARMLESS = frozenset({"out_of_sequence", "rnr_nak_retry_err"})
"""Counters that also increase on healthy networks: with adaptive routing, and where a receiver is not ready yet."""
DROPS = 10.0
"""A second. Healthy hosts drop a few packets of protocols that they do not know."""
DROPPED_RATIO = 0.001
"""A TCP connection within a data center loses most of its throughput somewhere between 0.1 and 1 %."""
USED_RATIO = 0.25
"""Of what the median of its peers carries: below it the port is for something else."""


@dataclass(frozen=True, slots=True)
class PortReading:
    """One port now. Counters are since the driver was loaded. What is not known is absent (None, or no key)."""

    kind: str = ""
    """Ports of the same kind are compared: the board and the link layer. Empty if there is nothing to compare."""
    is_up: bool | None = None
    rate: float | None = None
    """Bytes per second that the link can carry in a direction."""
    received: float | None = None
    """Bytes, or packets where `drops` are counted."""
    transmitted: float | None = None
    link_downs: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    """By the name of the kernel's counter."""
    drops: Mapping[str, float] = field(default_factory=dict)
    """Packets by direction: `receive`, `transmit`."""


Ports = Mapping[str, PortReading]
"""By name: `mlx5_3`, `mlx5_0/2` where the adapter has several, `eth0`."""


class PortFault(NamedTuple):
    """What is wrong with a port."""

    port: str
    reason: str
    """`down`, `rate`, `errors` or `drops`."""
    value: float
    """How often its link went down; its rate as a ratio of its peers'; errors per second; ratio of packets dropped."""


def find_fault(before: Ports, now: Ports, seconds: float, was_up: frozenset[str] = frozenset()) -> PortFault | None:
    """Return the worst fault of a node's ports in a window of so many seconds, or None.

    `was_up` are the names of ports that were active at any time.
    """
    changes = {name: _Change(before[name], port, seconds) for name, port in now.items() if name in before}
    for find in (_down, _rate, _errors, _drops):
        for name, change in sorted(changes.items()):
            peers = [one for other, one in changes.items() if other != name and one.now.kind == change.now.kind != ""]
            value = find(change, peers, name in was_up)
            if value is not None:
                return PortFault(name, find.__name__.removeprefix("_"), value)
    return None


class _Change(NamedTuple):
    before: PortReading
    now: PortReading
    seconds: float

    @property
    def carried(self) -> float:
        """Return what it received and transmitted."""
        then, now = self.before, self.now
        return _increase(then.received, now.received) + _increase(then.transmitted, now.transmitted)

    @property
    def errors_rate(self) -> float:
        """Return the errors per second."""
        before, now = self.before.errors, self.now.errors
        counted = (_increase(before.get(name), count) for name, count in now.items() if name not in HARMLESS)
        return sum(counted) / self.seconds


def _increase(before: float | None, now: float | None) -> float:
    """Return 0 where it is not known. A counter that has decreased was set to 0."""
    if before is None or now is None:
        return 0.0
    return now - before if now >= before else now


def _down(one: _Change, _peers: Sequence[_Change], was_up: bool) -> float | None:
    downs = _increase(one.before.link_downs, one.now.link_downs)
    is_lost = was_up and one.now.is_up is False
    return max(downs, 1.0) if downs or is_lost else None


def _rate(one: _Change, peers: Sequence[_Change], _was_up: bool) -> float | None:
    rates = [rate for peer in peers if (rate := peer.now.rate) and peer.now.is_up]
    if not (one.now.is_up and one.now.rate and rates):
        return None
    counts = Counter(rates)
    usual = max(counts, key=lambda rate: (counts[rate], rate))
    is_used = one.carried >= USED_RATIO * median(peer.carried for peer in peers) > 0.0
    return one.now.rate / usual if one.now.rate < usual and is_used else None


def _errors(one: _Change, peers: Sequence[_Change], _was_up: bool) -> float | None:
    usual = median(peer.errors_rate for peer in peers) if peers else 0.0
    return one.errors_rate if one.errors_rate >= max(ERRORS, ERRORS_OF_PEERS * usual) else None


def _drops(one: _Change, _peers: Sequence[_Change], _was_up: bool) -> float | None:
    carried = {"receive": (one.before.received, one.now.received)}
    carried["transmit"] = one.before.transmitted, one.now.transmitted
    ratios = []
    for direction, count in one.now.drops.items():
        dropped = _increase(one.before.drops.get(direction), count)
        if dropped >= DROPS * one.seconds:
            ratios.append(dropped / (_increase(*carried[direction]) + dropped))
    worst = max(ratios, default=0.0)
    return worst if worst >= DROPPED_RATIO else None
