"""The difference of step times under siege, with its 95% interval."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from testing.statistics import Interval, Resample, bootstrap

BLOCK = 5.0  # seconds whose steps count as one value, because successive steps are late together
Blocks = list[float]  # medians


@dataclass(frozen=True)
class Phase:
    """One phase of the siege; `cpu` is the exporter's CPU seconds in it."""

    name: str
    round: int
    began: float  # unix time
    ended: float
    cpu: float = 0.0

    def has(self, moment: float) -> bool:
        """Return whether the phase contains a time."""
        return self.began <= moment < self.ended


def blocks(phase: Phase, steps: Sequence[tuple[float, float]]) -> Blocks:
    """Return the median step of each five seconds of a phase; `steps` are (end, seconds)."""
    found: dict[int, list[float]] = defaultdict(list)
    for end, seconds in steps:
        if phase.has(end - seconds) and end < phase.ended:
            found[int((end - phase.began) / BLOCK)].append(seconds)
    return [statistics.median(values) for values in found.values()]


def difference(before: Sequence[Blocks], after: Sequence[Blocks]) -> Interval:
    """Return how many milliseconds longer a step is in `after`; blocks are resampled within each round.

    It is the mean over the rounds of the difference of their medians, so that a machine that slows down has no effect.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if all(pair)]
    if not pairs:
        return Interval(math.nan, math.nan, math.nan)

    def estimate(resample: Resample) -> float:
        return statistics.fmean(
            statistics.median(resample(late)) - statistics.median(resample(early)) for early, late in pairs
        )

    return bootstrap(estimate).scaled(1000, digits=3)
