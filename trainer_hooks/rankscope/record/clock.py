"""The node's two clocks. Ages come from CLOCK_MONOTONIC, because the wall clock may be set in either direction.

Unix times are only for people and Prometheus, by the wall clock's current setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from rankscope.record.layout import INDEX

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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
