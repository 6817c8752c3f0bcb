"""The node's network ports and their counters, read twice: a port without traffic carries no collective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankscope_exporter.capture.source import UnavailableError, cut
from rankscope_exporter.diagnosis.ports import PortReading
from rankscope_exporter.ranks.network_ports import GIGABIT, SYSFS, read_adapters, read_interfaces

PAUSE = 1.0
"""Seconds between the readings."""
BYTES = 64 * 1024


def describe_ports(sysfs: Path = SYSFS, *, pause: float = PAUSE) -> str:
    """Return a line for each InfiniBand, RoCE and Ethernet port that is hardware. Takes seconds and 64 KiB at most.

    Raise UnavailableError if there is none, as in a container.
    """
    adapters, interfaces, began = read_adapters(sysfs), read_interfaces(sysfs), time.monotonic()
    time.sleep(pause)
    seconds = time.monotonic() - began
    lines = [*_lines(adapters, read_adapters(sysfs), seconds, "bytes")]
    lines += _lines(interfaces, read_interfaces(sysfs), seconds, "packets")
    if not lines:
        raise UnavailableError("no network port that is hardware is visible here")
    return cut("\n".join(lines), BYTES)


def _lines(
    before: Mapping[str, PortReading], after: Mapping[str, PortReading], seconds: float, unit: str
) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if name in after:
            yield f"{name}: {', '.join(_parts(before.get(name, after[name]), after[name], seconds, unit))}"
        else:
            yield f"{name}: went down or was removed between the readings"


def _parts(before: PortReading, after: PortReading, seconds: float, unit: str) -> Iterator[str]:
    if after.kind.strip():
        yield after.kind.strip()
    if after.is_up is not None:
        yield "up" if after.is_up else "DOWN"
    if after.rate is not None:
        yield f"{after.rate / GIGABIT:g} Gb/s"
    for word, new, old in (
        ("received", after.received, before.received),
        ("transmitted", after.transmitted, before.transmitted),
    ):
        if new is not None and old is not None:
            yield f"{word} {new - old:.0f} {unit} in {seconds:.1f} s"
    if after.link_downs is not None:
        yield f"link down {after.link_downs:.0f} times"
    counts = {**after.errors, **{f"dropped at {direction}": number for direction, number in after.drops.items()}}
    errors = ", ".join(f"{name} {number:.0f}" for name, number in counts.items() if number)
    yield f"errors since the driver was loaded: {errors or 'none'}"
