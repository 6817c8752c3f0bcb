"""Steps of either clock, and the level at which they are chosen by their number (`rankscope.record.sampling`).

Ranks that train together get the same level, on whatever node they are. If two ranks differ by one level, steps of the
higher level are chosen on both.
"""

from __future__ import annotations

from math import ceil

from rankscope.record.sampling import MAX_LEVEL
from rankscope.record.snapshot import DeviceStep, RankSnapshot, Step

AnyStep = Step | DeviceStep

_MAX_STEPS = 2.0**MAX_LEVEL


def level_of(snapshot: RankSnapshot, interval: float) -> int:
    """Return the least level at which steps are chosen at most once per `interval` seconds on average.

    Use the mean of all steps: a mean of recent steps would differ between ranks that are read at different times.
    """
    seconds = snapshot["step_seconds"]  # without the first step, which is start-up
    steps = max(0.0, snapshot["steps"] - 1)
    needed = min(interval * steps / seconds, _MAX_STEPS) if seconds else _MAX_STEPS
    return (max(1, ceil(needed)) - 1).bit_length()
