"""Read the node's network ports from sysfs.

`/sys/class/infiniband/DEVICE/ports/PORT` is described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband,
`/sys/class/net/INTERFACE/statistics` in Documentation/ABI/testing/sysfs-class-net-statistics. The files depend on the
adapter's driver: AWS' EFA has no `counters` and counts bytes in `hw_counters`. The names there are those of the drivers
mlx5, efa, bnxt_re and ionic in the kernel's drivers/infiniband/hw.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rankscope_exporter.diagnosis.ports import PortReading, Ports

SYSFS = Path("/sys")
PORTS_LIMIT = 256
"""The most ports that are read. A node with many virtual functions has more, and each takes milliseconds."""
RATE = re.compile(r"([\d.]+) Gb/sec")
GIGABIT = 1e9 / 8.0
ACTIVE = ("4:", "5:")
"""Prefixes of `state` while packets can be sent: `4: ACTIVE`, `5: ACTIVE_DEFER`."""
IS_ENABLED = 0x1
"""Bit of `flags` (IFF_UP in the kernel's include/uapi/linux/if.h): an administrator wants the interface to be up."""
WORD = 4.0
"""Bytes per unit of `port_rcv_data` and `port_xmit_data`."""
ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "link_error_recovery",
)
HARDWARE_ERRORS = (
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),  # mlx5, newer bnxt_re
    *("retrans_pkts", "retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events"),  # efa
    *("to_retransmits", "seq_err_naks_rcvd", "max_retry_exceeded", "rx_roce_errors", "tx_roce_errors"),  # bnxt_re
    *("tx_rdma_ack_timeout", "req_tx_retry_excd_err"),  # ionic
)
RECEIVED, TRANSMITTED = ("rx_bytes", "rx_rdma_ucast_bytes"), ("tx_bytes", "tx_rdma_ucast_bytes")


def read_adapters(sysfs: Path = SYSFS) -> Ports:
    """Return the InfiniBand and RoCE ports."""
    found = {}
    for device in _entries(sysfs / "class/infiniband"):
        ports = _entries(device / "ports")
        kind = _text(device / "board_id") or _text(device / "hca_type") or ""
        for port in ports:
            name = device.name if len(ports) == 1 else f"{device.name}/{port.name}"
            found[name] = _adapter(port, kind)
            if len(found) >= PORTS_LIMIT:
                return found
    return found


def read_interfaces(sysfs: Path = SYSFS) -> Ports:
    """Return the Ethernet interfaces that are hardware and up. Their traffic is counted in packets."""
    hardware = [one for one in _entries(sysfs / "class/net") if (one / "device").exists()]
    return {
        one.name: _interface(one / "statistics")
        for one in hardware[:PORTS_LIMIT]
        if _text(one / "operstate") in ("up", "unknown")
    }


def read_hardware_interfaces(sysfs: Path = SYSFS) -> Ports:
    """Return whether the Ethernet interfaces that are hardware and enabled have a link, its rate, and its losses."""
    found = {}
    for one in _entries(sysfs / "class/net")[:PORTS_LIMIT]:
        flags, state = _text(one / "flags") or "0x0", _text(one / "operstate")
        if (one / "device").exists() and int(flags, 16) & IS_ENABLED and state in ("up", "down"):
            kind = f"{_text(one / 'device/vendor')} {_text(one / 'device/device')}"
            speed = _number(one / "speed")  # Mb/s
            rate = None if speed is None else speed * GIGABIT / 1000
            # The kernel counts from the driver's start, when there is no link yet.
            downs = _number(one / "carrier_down_count") if _number(one / "carrier_up_count") else 0.0
            found[one.name] = PortReading(kind, state == "up", rate, link_downs=downs)
    return found


def _adapter(port: Path, kind: str) -> PortReading:
    counters, hardware = port / "counters", port / "hw_counters"
    received, transmitted = _number(counters / "port_rcv_data"), _number(counters / "port_xmit_data")
    rate, state = RATE.match(_text(port / "rate") or ""), _text(port / "state")
    return PortReading(
        kind=f"{kind} {_text(port / 'link_layer') or ''}",
        is_up=None if state is None else state.startswith(ACTIVE),
        rate=float(rate[1]) * GIGABIT if rate else None,
        received=_first(hardware, RECEIVED) if received is None else WORD * received,
        transmitted=_first(hardware, TRANSMITTED) if transmitted is None else WORD * transmitted,
        link_downs=_number(counters / "link_downed"),
        errors=dict(_known(counters, ERRORS)) | dict(_known(hardware, HARDWARE_ERRORS)),
    )


def _interface(statistics: Path) -> PortReading:
    dropped = dict(_known(statistics, ("rx_dropped", "rx_missed_errors", "tx_dropped")))
    received = [dropped[name] for name in ("rx_dropped", "rx_missed_errors") if name in dropped]
    transmitted = dropped.get("tx_dropped")
    drops = {"receive": sum(received)} if received else {}
    return PortReading(
        received=_number(statistics / "rx_packets"),
        transmitted=_number(statistics / "tx_packets"),
        drops=drops if transmitted is None else {**drops, "transmit": transmitted},
    )


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:  # no adapter, or it has just been removed
        return []


def _known(directory: Path, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for name in names:
        value = _number(directory / name)
        if value is not None:
            yield name, value


def _first(directory: Path, names: tuple[str, ...]) -> float | None:
    return next((value for _, value in _known(directory, names)), None)


def _number(path: Path) -> float | None:
    """Return a counter; None if the driver does not have it or cannot read it now."""
    text = _text(path)
    return float(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
