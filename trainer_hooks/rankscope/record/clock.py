"""The node's two clocks. Ages come from CLOCK_MONOTONIC, because the wall clock may be set in either direction.

Unix times are only for people and Prometheus, by the wall clock's current setting. In a time namespace (Linux 5.6), a
container has monotonic clocks of its own: ahead of or behind the machine's by constant offsets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rankscope.record.layout import INDEX

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESS = Path("/proc/self")
# Seconds. A smaller change of the clocks' difference is NTP slewing, or the time between the two reads.
STEP = 0.1
UNIX_TIMES = (INDEX["started_unix"], INDEX["checkpoint_last_unix"])


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's ID of this boot; empty if there is none. Monotonic times hold for one boot only."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Clocks(NamedTuple):
    """The offsets of monotonic clocks from others of the same machine, in seconds."""

    monotonic: float = 0.0
    boottime: float = 0.0

    def ahead_of(self, others: Sequence[float]) -> Clocks:
        """Return how far these clocks are ahead of others, both given by their offsets from the machine's clocks."""
        return Clocks(self.monotonic - others[0], self.boottime - others[1])


MACHINE = Clocks()


def own_clocks() -> Clocks:
    """Return the offsets of this process's clocks from the machine's: those of its time namespace."""
    try:
        # The kernel shows the offsets for its children, which have another namespace only after unshare(CLONE_NEWTIME).
        if (PROCESS / "ns/time").readlink() != (PROCESS / "ns/time_for_children").readlink():
            return MACHINE
        lines = (PROCESS / "timens_offsets").read_text().splitlines()
        offsets = {name: int(seconds) + int(fraction) / 1e9 for name, seconds, fraction in map(str.split, lines)}
        return Clocks(offsets["monotonic"], offsets["boottime"])
    except (OSError, ValueError, KeyError):  # Linux before 5.6
        return MACHINE


class NodeClock:
    """Converts monotonic times to unix times, by the current setting of the node's clock.

    A time keeps its unix time until the clock is set by more than STEP; otherwise it would change with each read.
    """

    def __init__(self, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._unix = unix
        self._monotonic = monotonic
        self._offset = unix() - monotonic()

    def offset(self) -> float:
        """Return the offset from monotonic to unix time."""
        offset = self._unix() - self._monotonic()
        if abs(offset - self._offset) > STEP:
            self._offset = offset
        return self._offset


def renew_unix_times(slots: memoryview[float], unix: float, monotonic: float) -> None:
    """Shift the record's unix times to the clock's current setting, given by `unix` and `monotonic`.

    Call it before writing a unix time, so that all of them match the monotonic start.
    """
    change = unix - monotonic - (slots[INDEX["started_unix"]] - slots[INDEX["started_monotonic"]])
    if abs(change) > STEP:
        for index in UNIX_TIMES:
            if slots[index]:
                slots[index] += change
