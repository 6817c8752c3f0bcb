"""Faults of network ports, by their counters over a minute and compared with similar ports.

down     the port was active and is not, or its link went down in the window
rate     the port is slower than most ports of the same board, but carries as much traffic: a storage adapter,
         which may be slower on purpose, carries less
errors   link errors and retransmissions: at least `ERRORS` per second and ten times the median of its peers
drops    packets that the node drops: at least `DROPS` per second and `DROPPED_RATIO` of all packets
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rankscope_exporter.diagnosis.counters import increase

ERRORS = 10.0
"""Per second. InfiniBand allows a bit error rate of 1e-12 (IBTA specification, volume 2): 0.4 errors/s at 400 Gb/s."""
ERRORS_OF_PEERS = 10.0
HARMLESS = frozenset({"out_of_sequence", "rnr_nak_retry_err"})
"""Counters that also increase on healthy networks: with adaptive routing, and when a receiver is not ready yet."""
DROPS = 10.0
"""Per second. Healthy hosts drop a few packets of unknown protocols."""
DROPPED_RATIO = 0.001
"""A TCP connection within a data center loses most of its throughput between 0.1% and 1%."""
USED_RATIO = 0.25
"""Ratio of the median traffic of its peers, below which the port has another purpose."""


@dataclass(frozen=True, slots=True)
class PortReading:
    """One port now. Counters start when the driver is loaded. Unknown values are absent (None, or no key)."""

    kind: str = ""
    """The board and link layer. Ports of the same kind are compared; empty if there is nothing to compare."""
    is_up: bool | None = None
    rate: float | None = None
    """Bytes per second of the link in one direction."""
    received: float | None = None
    """Bytes, or packets if `drops` are counted."""
    transmitted: float | None = None
    link_downs: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    """Errors by the name of the kernel's counter."""
    drops: Mapping[str, float] = field(default_factory=dict)
    """Packets by direction: `receive`, `transmit`."""


Ports = Mapping[str, PortReading]
"""Ports by name: `mlx5_3`, `mlx5_0/2` if the adapter has several ports, `eth0`."""


class PortFault(NamedTuple):
    """A fault of a port."""

    port: str
    reason: str
    """`down`, `rate`, `errors` or `drops`."""
    value: float
    """For each reason: link downs, rate as a ratio of its peers', errors per second, ratio of dropped packets."""


def find_fault(before: Ports, now: Ports, seconds: float, was_up: frozenset[str] = frozenset()) -> PortFault | None:
    """Return the worst fault of a node's ports in a window of `seconds`, or None.

    `was_up` are the names of the ports that were active at any time.
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
        """Return the traffic in both directions."""
        then, now = self.before, self.now
        return _increase(then.received, now.received) + _increase(then.transmitted, now.transmitted)

    @property
    def errors_rate(self) -> float:
        """Return the errors per second, without harmless ones."""
        before, now = self.before.errors, self.now.errors
        counted = (_increase(before.get(name), count) for name, count in now.items() if name not in HARMLESS)
        return sum(counted) / self.seconds


def _increase(before: float | None, now: float | None) -> float:
    return increase(now, before) or 0.0


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
