"""The arithmetic of a siege: percentiles of scrapes, and what a step takes longer, with its 95 % interval."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 5.0  # seconds whose steps count as one value: those that follow each other are late together
RESAMPLES = 2000
Blocks = list[float]  # medians


@dataclass(frozen=True)
class Phase:
    """One stretch of the time; `processor` is the exporter's seconds in it."""

    name: str
    round: int
    began: float  # unix time
    ended: float
    processor: float = 0.0

    def has(self, moment: float) -> bool:
        """Whether it was then."""
        return self.began <= moment < self.ended


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above (nearest rank): of 1,000 the 990th for 0.99."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def blocks(phase: Phase, steps: Sequence[tuple[float, float]]) -> Blocks:
    """The median step of each five seconds of a phase; `steps` are (end, seconds)."""
    found: dict[int, list[float]] = defaultdict(list)
    for end, seconds in steps:
        if phase.has(end - seconds) and end < phase.ended:
            found[int((end - phase.began) / BLOCK)].append(seconds)
    return [statistics.median(values) for values in found.values()]


def difference(before: Sequence[Blocks], after: Sequence[Blocks]) -> tuple[float, float, float]:
    """How much longer a step was in `after`, by round, with a 95 % interval (a bootstrap of the blocks of each round).

    The mean over the rounds of the difference of their medians, so that a machine that grows slower tells nothing.
    """
    generator = random.Random(0)

    def of(pairs: Sequence[tuple[Blocks, Blocks]]) -> float:
        return statistics.fmean(statistics.median(late) - statistics.median(early) for early, late in pairs)

    def drawn(values: Blocks) -> Blocks:
        return generator.choices(values, k=len(values))

    pairs = [pair for pair in zip(before, after, strict=True) if all(pair)]
    if not pairs:
        return math.nan, math.nan, math.nan
    found = sorted(of([(drawn(early), drawn(late)) for early, late in pairs]) for _ in range(RESAMPLES))
    return of(pairs), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]
