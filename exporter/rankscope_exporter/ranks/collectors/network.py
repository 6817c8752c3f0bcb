"""The node's network ports from sysfs: their traffic and faults."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from rankscope_exporter.diagnosis.ports import PortFault, PortReading, Ports, find_fault
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.flags import flag
from rankscope_exporter.ranks.network_ports import SYSFS, read_adapters, read_interfaces
from rankscope_exporter.ranks.rank import Scan

READ_INTERVAL = 5.0
"""Seconds between two readings. Each of some 13 counters takes about 30 µs, since the adapter's firmware answers."""
WINDOW = 60.0
"""Seconds of the window in which faults are detected."""
LABELS = ("port",)


def _counter(name: str, text: str, *labels: str) -> Declaration:
    return Declaration("counter", f"rankscope_network_{name}", text, (*LABELS, *labels))


UP = Declaration("gauge", "rankscope_network_port_up", "1 while an InfiniBand or RoCE port is active.", LABELS)
RATE = Declaration(
    "gauge",
    "rankscope_network_port_rate_bytes_per_second",
    "Link rate of an InfiniBand or RoCE port in one direction; lower than its peers' if the link has lost lanes.",
    LABELS,
)
RECEIVED = _counter("port_received_bytes_total", "Bytes that an InfiniBand or RoCE port has received.")
TRANSMITTED = _counter("port_transmitted_bytes_total", "Bytes that an InfiniBand or RoCE port has transmitted.")
DOWNS = _counter("port_link_downs_total", "Times that the link of an InfiniBand or RoCE port has gone down.")
ERRORS = _counter(
    "port_errors_total",
    "Errors and retransmissions of an InfiniBand or RoCE port, by the name of the kernel's counter.",
    "error",
)
DROPPED = _counter(
    "interface_dropped_packets_total",
    "Packets that the node has dropped at an Ethernet interface, by `direction` (`receive`, `transmit`). Only hardware "
    "interfaces in the exporter's network namespace.",
    "direction",
)
METRICS = (UP, RATE, RECEIVED, TRANSMITTED, DOWNS, ERRORS, DROPPED)


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """The settings of the collector."""

    sysfs: Path = flag(
        "--path.sysfs",
        type=Path,
        default=SYSFS,
        metavar="DIR",
        help="the host's sysfs, for its network ports (default: %(default)s)",
    )


class Network:
    """The collector of network ports, read every few seconds. Used by one thread."""

    name = "network"
    help = "network ports: InfiniBand and RoCE traffic, rate, errors; packets dropped by Ethernet interfaces"
    metrics = METRICS

    def __init__(self, sysfs: Path = SYSFS, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sysfs = sysfs
        self._monotonic = monotonic
        self._readings: deque[tuple[float, Ports]] = deque()
        """The readings of the last WINDOW seconds, the newest last."""
        self._was_up: frozenset[str] = frozenset()
        self._families: list[Metric] = []
        self.fault: PortFault | None = None
        """The fault of a port in the last reading, if any."""

    def poll(self, _scan: Scan) -> list[Metric]:
        """Read the ports and detect faults, if READ_INTERVAL has passed."""
        now = self._monotonic()
        if not self._readings or now - self._readings[-1][0] >= READ_INTERVAL:
            self._read(now)
        return self._families

    def _read(self, now: float) -> None:
        adapters, interfaces = read_adapters(self._sysfs), read_interfaces(self._sysfs)
        self._was_up |= {name for name, port in adapters.items() if port.is_up}
        self._readings.append((now, {**adapters, **interfaces}))
        while now - self._readings[0][0] > WINDOW:
            self._readings.popleft()
        since, before = self._readings[0]
        self.fault = find_fault(before, self._readings[-1][1], now - since, self._was_up) if now > since else None
        values = _values(adapters, interfaces)
        self._families = [declared.family(values[declared]) for declared in METRICS]


def _values(adapters: Ports, interfaces: Ports) -> Mapping[Declaration, Mapping[tuple[str, ...], float | None]]:
    def each(value: Callable[[PortReading], float | None]) -> dict[tuple[str, ...], float | None]:
        return {(name,): value(port) for name, port in adapters.items()}

    return {
        UP: each(lambda port: port.is_up),
        RATE: each(lambda port: port.rate),
        RECEIVED: each(lambda port: port.received),
        TRANSMITTED: each(lambda port: port.transmitted),
        DOWNS: each(lambda port: port.link_downs),
        ERRORS: {(name, error): n for name, port in adapters.items() for error, n in port.errors.items()},
        DROPPED: {(name, way): n for name, port in interfaces.items() for way, n in port.drops.items()},
    }
