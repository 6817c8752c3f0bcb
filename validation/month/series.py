"""Counters of simulated steps: a series of some thousand steps is drawn once, and the run repeats it.

A run makes the same kind of steps for hours. Its counters after any number of steps follow from the sums of the series,
so that a reading costs the same however many steps are between it and the last one. Durations are whole nanoseconds:
their sums are exact, and no rounding error looks like a counter that starts again.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from validation.month.record import BUCKETS as STEP_BOUNDS
from validation.month.record import Peers, align
from validation.month.steps import Array, P

from rankscope.record.phases import PLANNED

NANO = 1e-9
PLANNED_NUMBERS = [P[phase] for phase in PLANNED]
SECONDS, FLOOR, SKEW, COLLECTED = slice(0, 10), 10, 11, 12
BLAME, COMPARED, MEASURED = slice(13, 24), slice(24, 34), slice(34, 44)
"""Columns of `by_rank`: seconds by phase of all steps, of the compared steps, and of those measured on the device."""
COMPARED_STEPS, MEASURED_STEPS, COMPARED_SECONDS, BUCKETS = 0, 1, 2, slice(3, None)
"""Columns of `common`."""
BY_RANK, COMMON = 44, BUCKETS.start + len(STEP_BOUNDS) + 1
"""The number of columns."""
RESTLESS = 0.05
"""The ratio by which a rank's time in a phase may differ from the usual: a third of the least loss that is found in
seconds. It has to last for both halves of the shortest span that is judged."""
HALF_SECONDS, HALF_STEPS = 4.0, 6


class Series:
    """The sums of a series of steps: before the first, after the first, and so on."""

    def __init__(self, durations: Array, collected: Array, is_measured: Array, peers: Peers) -> None:
        """Set nanoseconds by step, phase and rank, and of garbage collections by step and rank."""
        self.durations = durations
        lengths = durations[:, :, 0].sum(axis=1)
        self.ends = _sums(lengths)
        is_compared = is_measured & (durations[:, PLANNED_NUMBERS].sum(axis=(1, 2)) == 0)
        by_rank = np.zeros((len(durations), durations.shape[2], BY_RANK), np.int64)
        floor, skew, blame = align(durations, peers)
        by_rank[:, :, SECONDS] = np.swapaxes(durations, 1, 2)
        by_rank[:, :, COLLECTED] = collected
        by_rank[is_compared, :, FLOOR] = floor[is_compared]
        by_rank[is_compared, :, SKEW] = skew[is_compared]
        by_rank[is_compared, :, BLAME] = np.swapaxes(blame, 1, 2)[is_compared]
        by_rank[is_compared, :, COMPARED] = by_rank[is_compared, :, SECONDS]
        by_rank[is_measured, :, MEASURED] = by_rank[is_measured, :, SECONDS]
        self.by_rank = _sums(by_rank)
        counts = np.stack((is_compared, is_measured, is_compared * lengths), axis=1)
        buckets = np.identity(len(STEP_BOUNDS) + 1)[np.searchsorted(STEP_BOUNDS, lengths * NANO)]
        self.common = _sums(np.concatenate((counts, buckets), axis=1).astype(np.int64))

    def __len__(self) -> int:
        return len(self.durations)

    @cached_property
    def restless(self) -> Array:
        """The sums of the steps in which the time of some rank in some phase is not the usual for a while."""
        half = max(HALF_STEPS, int(np.ceil(HALF_SECONDS / NANO * len(self) / self.ends[-1])))
        if 2 * half >= len(self):
            return np.arange(len(self) + 1)
        spent, long = self.by_rank[:, :, SECONDS], self.ends[half:] - self.ends[:-half]
        ratios = (spent[half:] - spent[:-half]) / long[:, None, None]
        differs = np.abs(ratios - spent[-1] / self.ends[-1]) > RESTLESS
        first = np.flatnonzero((differs[:-half] & differs[half:]).any(axis=(1, 2)))
        edges = np.zeros(len(self) + 1)
        np.add.at(edges, first, 1)
        np.add.at(edges, first + 2 * half, -1)
        return _sums(np.cumsum(edges)[:-1] > 0)


def added(sums: Array, first: int, steps: int) -> Array:
    """Return what so many steps from the first one add to the sums of a series, which is repeated."""
    rounds, last = divmod(first + steps, len(sums) - 1)
    return np.asarray(rounds * sums[-1] + sums[last] - sums[first])


def _sums(values: Array) -> Array:
    return np.concatenate((np.zeros_like(values[:1], np.int64), np.cumsum(values, axis=0)))
