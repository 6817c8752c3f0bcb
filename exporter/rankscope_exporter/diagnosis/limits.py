"""Limits over all owners of runs: each has a fair share, and it is known which runs take too much CPU time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rankscope_exporter.diagnosis.readings import Run

OWNERS = 32
"""The number of parts of a limit that go to those who came first. A node has at most 16 GPUs, but a user who may start
pods with any uid can be hundreds of owners."""
CPU_SECONDS = 0.1
"""The most CPU time of an update of all runs, which is once a second. 256 ranks with few phases and groups take 0.05 s,
and others up to three times as long."""
RANK_CPU_SECONDS = 0.0003
"""What a rank is taken to need before that is measured."""
UPDATES, SPIKE = 8.0, 4.0
"""The number of updates over which the CPU time is averaged, and the multiple of the mean that one may count as: a run
is not charged for all of a garbage collection."""
HOLD_SECONDS = 300.0
"""How long a run that takes too much CPU time is not diagnosed, so that it does not begin and end all the time."""
ROUNDING = 1e-9


def fair_shares(demands: Mapping[str, float], limit: float) -> Mapping[str, float]:
    """Return the share of each owner. The demands are in the order in which the owners came.

    In this order, each owner gets up to one of `OWNERS` parts of the limit: a newcomer takes nothing of it. The rest is
    divided equally, and what one owner does not need is for the others.
    """
    if sum(demands.values()) <= limit:
        return demands
    left, shares = limit, {}
    for owner, demand in demands.items():
        shares[owner] = min(demand, limit / OWNERS, left)
        left -= shares[owner]
    lacks = {owner: demand - shares[owner] for owner, demand in demands.items()}
    for number, owner in enumerate(sorted(lacks, key=lacks.__getitem__)):
        more = min(lacks[owner], left / (len(lacks) - number))
        shares[owner], left = shares[owner] + more, left - more
    return shares


class CpuTime:
    """The CPU time that the diagnosis of each run takes, and which runs take more than their owner's share."""

    def __init__(self, clock: Callable[[], float], limit: float = CPU_SECONDS) -> None:
        """Set the clock of the thread's CPU time, and the most seconds of an update of all runs."""
        self._clock = clock
        self._limit = limit
        self._means: dict[Run, float] = {}
        """CPU seconds per update."""
        self._held: dict[Run, float] = {}
        """When each run that took too much may be diagnosed again."""

    @contextmanager
    def measured(self, run: Run, ranks: int) -> Iterator[None]:
        """Measure an update of a run of so many ranks."""
        began, mean = self._clock(), self._mean(run, ranks)
        try:
            yield
        finally:
            self._means[run] = mean + (min(self._clock() - began, SPIKE * mean) - mean) / UPDATES

    def exceeding(self, at: float, runs: Mapping[str, Sequence[Run]], ranks: Mapping[Run, Collection[int]]) -> set[Run]:
        """Return the runs that are not to be diagnosed now: of each owner those that do not fit, the last ones first.

        The owners are in the order in which they came.
        """
        waiting = {run for run, until in self._held.items() if until > at}
        means = {run: self._mean(run, len(ranks[run])) for of_owner in runs.values() for run in of_owner}
        demands = {owner: sum(means[run] for run in found if run not in waiting) for owner, found in runs.items()}
        for owner, share in fair_shares(demands, self._limit).items():
            left = share + ROUNDING
            for run in runs[owner]:
                if run in waiting:
                    continue
                if means[run] <= left:
                    left -= means[run]
                else:
                    self._held[run] = at + HOLD_SECONDS
                    self._means[run] = means[run] / 2.0  # else it would never be measured again
        return {run for run in means if self._held.get(run, at) > at}

    def forget(self, known: Collection[Run]) -> None:
        """Forget all other runs."""
        self._means = {run: mean for run, mean in self._means.items() if run in known}
        self._held = {run: until for run, until in self._held.items() if run in known}

    def _mean(self, run: Run, ranks: int) -> float:
        return self._means.get(run, RANK_CPU_SECONDS * ranks)
