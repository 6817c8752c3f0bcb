"""Counters of simulated steps: a series of some thousand steps is drawn once, and the run repeats it.

A run makes the same kind of steps for hours. Its counters after any number of steps follow from the sums of the series,
so that a reading costs the same however many steps are between it and the last one. Durations are whole nanoseconds:
their sums are exact, and no rounding error looks like a counter that starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from validation.month.steps import PHASES, WAIT, Array, P

from rankscope.record.phases import PLANNED

STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CAUSES = [number for name, number in P.items() if name not in ("collective_wait", "startup")]
UNKNOWN = len(PHASES)
Peers = Sequence[Sequence[int]]
"""Groups of ranks that are compared with each other."""
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


def align(durations: Array, peers: Peers) -> tuple[Array, Array, Array]:
    """Return floor, skew and blame by step and rank, blame also by phase (rankscope_exporter/ranks/step_alignment.py).

    The floor is the least wait of any peer, the skew this rank's wait above it, the blame the others' wait for it.
    """
    steps, _, ranks = durations.shape
    floor, skew = np.empty((2, steps, ranks), durations.dtype)
    blame = np.zeros((steps, UNKNOWN + 1, ranks), durations.dtype)
    for members in peers:
        of_peers = durations[:, :, members]
        waits = of_peers[:, WAIT]
        least, last = waits.min(axis=1, keepdims=True), waits.argmin(axis=1)
        floor[:, members], skew[:, members] = least, waits - least
        waited = (waits - least).sum(axis=1) / (len(members) - 1)
        cause = _late_phase(of_peers[:, CAUSES], last, waited)
        blame[np.arange(steps), cause, np.array(members)[last]] = waited
    return floor, skew, blame


def _late_phase(durations: Array, last: Array, waited: Array) -> Array:
    """Return by step the phase in which the last rank exceeds the median of the others most, if that is enough."""
    others = durations.shape[2] - 1
    own = np.take_along_axis(durations, last[:, None, None], axis=2)[..., 0]
    ordered = np.sort(durations, axis=2)
    # Without its own duration, the later ones move up by one.
    middle = [
        np.where(own <= ordered[..., i], ordered[..., i + 1], ordered[..., i]) for i in ((others - 1) // 2, others // 2)
    ]
    excess = own - (middle[0] + middle[1]) / 2
    largest = excess.argmax(axis=1)
    explains = np.take_along_axis(excess, largest[:, None], axis=1)[:, 0] >= waited / 2
    return np.where(explains, np.array(CAUSES)[largest], UNKNOWN)
