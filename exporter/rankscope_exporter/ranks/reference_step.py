"""Which of a rank's steps stands for the others, so that ranks can be compared step by step across nodes.

Exporters cannot see each other's ranks, but Prometheus sees all of them: where every rank shows the same step, rules
can lay them side by side. Which one that is follows from the step's number alone (`rankscope.record.sampling`) and from
a level that the mean step gives: at ranks that train together it comes out alike, and where two are one level apart,
what is chosen at the higher one is chosen at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rankscope.record.sampling import MAX_LEVEL, is_sampled, next_sampled
from rankscope.record.snapshot import DeviceStep, RankSnapshot, Step

AnyStep = Step | DeviceStep

_MOST = 2.0**MAX_LEVEL


class Reference(NamedTuple):
    """A rank's reference step, and the clock that it was measured by."""

    clock: str
    step: AnyStep


def level_of(snapshot: RankSnapshot, interval: float) -> int:
    """The least level at which steps are chosen no more often than each `interval` seconds, on average.

    By the mean of all steps so far: a mean of the last ones would differ between ranks, by when each was read.
    """
    seconds = snapshot["step_seconds"]  # without the first step, which is start-up
    steps = max(0.0, snapshot["steps"] - 1)
    needed = min(interval * steps / seconds, _MOST) if seconds else _MOST
    return (max(1, ceil(needed)) - 1).bit_length()


def newest_sampled(steps: Sequence[AnyStep], level: int) -> AnyStep | None:
    """The last of `steps`, which are in their order, that is chosen at that level."""
    # Nearly always there is none, and to be told so at once costs a tenth of asking of each.
    if not steps or next_sampled(steps[0].number, level) > steps[-1].number:
        return None
    return next((step for step in reversed(steps) if is_sampled(step.number, level)), None)
