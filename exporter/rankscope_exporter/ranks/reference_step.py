"""The reference step of a rank, by which ranks are compared step by step across nodes.

An exporter does not see other nodes' ranks, but Prometheus does: if all ranks show the same step, rules can compare
them. Steps are chosen by their number (`rankscope.record.sampling`) and by a level that follows from the mean step.
Ranks that train together get the same level. If two ranks differ by one level, steps of the higher level are chosen on
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rankscope.record.sampling import MAX_LEVEL, is_sampled, next_sampled
from rankscope.record.snapshot import DeviceStep, RankSnapshot, Step

AnyStep = Step | DeviceStep

_MAX_STEPS = 2.0**MAX_LEVEL


class Reference(NamedTuple):
    """A rank's reference step, and the clock that measured it."""

    clock: str
    step: AnyStep


def level_of(snapshot: RankSnapshot, interval: float) -> int:
    """Return the least level at which steps are chosen at most once per `interval` seconds on average.

    Use the mean of all steps: a mean of recent steps would differ between ranks that are read at different times.
    """
    seconds = snapshot["step_seconds"]  # without the first step, which is start-up
    steps = max(0.0, snapshot["steps"] - 1)
    needed = min(interval * steps / seconds, _MAX_STEPS) if seconds else _MAX_STEPS
    return (max(1, ceil(needed)) - 1).bit_length()


def newest_sampled(steps: Sequence[AnyStep], level: int) -> AnyStep | None:
    """Return the last of the ordered `steps` that is chosen at the level, or None."""
    # Usually there is none, and this check costs a tenth of checking each step.
    if not steps or next_sampled(steps[0].number, level) > steps[-1].number:
        return None
    return next((step for step in reversed(steps) if is_sampled(step.number, level)), None)
