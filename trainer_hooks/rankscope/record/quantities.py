"""Ratios, times and numbers as people read them, with two significant digits at the most."""

from __future__ import annotations

import time

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
LARGEST = 99.5
"""From here on a number has three digits."""


def percent(ratio: float) -> str:
    """Return a ratio: `44%`, `6.3%`, `0.7%`. Below 0 there is no loss: `0%`."""
    value = 100.0 * max(0.0, ratio)
    if value >= 9.95 or value < 0.01:
        return f"{value:.0f}%"
    return f"{value:.2g}%" if value >= 0.95 else f"{value:.1g}%"


def duration(seconds: float) -> str:
    """Return a time: `40 s`, `1.8 min`, `3 h`, `10 days`."""
    if seconds < LARGEST:
        return f"{seconds:.0f} s"
    for unit, size in (("min", MINUTE), ("h", HOUR)):
        if seconds < LARGEST * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / DAY:.2g} days" if seconds < LARGEST * DAY else f"{seconds / DAY:.0f} days"


def utc(unix: float) -> str:
    """Return a moment of unix time: `2026-05-04 13:37:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))


def number(value: float) -> str:
    """Return a number without decimals if it is large: `0.001`, `3.5`, `1200`."""
    return f"{value:.2g}" if value < LARGEST else f"{float(f'{value:.2g}'):.0f}"


def count(things: int, name: str) -> str:
    """Return a number of things: `1 rank`, `2 ranks`."""
    return f"{things} {name}{'' if things == 1 else 's'}"


def size(number_of_bytes: float) -> str:
    """Return a number of bytes: `800 B`, `1.5 KiB`, `48 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_of_bytes < LARGEST * 10:
            return f"{number(number_of_bytes)} {unit}"
        number_of_bytes /= 1024.0
    return f"{number(number_of_bytes)} TiB"
