"""The node's two clocks. Ages come from CLOCK_MONOTONIC; the other one may be set at any time, in both directions.

Unix times are only for people and for Prometheus, by the clock as it is set now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from rankscope.record.layout import INDEX

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Seconds: a smaller change of the difference of both clocks is NTP's slewing, or the time between the two readings.
STEP = 0.1
UNIX_TIMES = (INDEX["started_unix"], INDEX["checkpoint_last_unix"])


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's name for this boot; empty if it tells none. Monotonic times of another boot mean nothing."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class NodeClock:
    """Gives monotonic times their unix times, by the node's clock as it is set now.

    A moment keeps its unix time until the clock is set by more than STEP: else it would be another one at each reading.
    """

    def __init__(self, unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._unix = unix
        self._monotonic = monotonic
        self._offset = unix() - monotonic()

    def offset(self) -> float:
        """Return what to add to a monotonic time for its unix time."""
        offset = self._unix() - self._monotonic()
        if abs(offset - self._offset) > STEP:
            self._offset = offset
        return self._offset


def renew_unix_times(slots: memoryview[float], unix: float, monotonic: float) -> None:
    """Change the record's unix times to the node's clock as it is set now, of which these are the times.

    Call it before writing a unix time, so that all of them and the monotonic start belong together.
    """
    change = unix - monotonic - (slots[INDEX["started_unix"]] - slots[INDEX["started_monotonic"]])
    if abs(change) > STEP:
        for index in UNIX_TIMES:
            if slots[index]:
                slots[index] += change
