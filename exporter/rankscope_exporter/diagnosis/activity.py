"""The idle time of each rank: its processes use no CPU time and read no storage, and its GPU runs no kernel.

A rank that loads, compiles or indexes is not idle. A rank that sleeps, waits for a lock, or whose loader is deadlocked
is idle. So is a rank that waits for another service, or downloads very slowly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rankscope_exporter.diagnosis.readings import RankReading

INTERVAL = 10.0
"""Seconds over which the use is averaged. A shorter interval would count a garbage collection as work."""


class _Since(NamedTuple):
    idle: float
    """The time since which a rank is idle."""
    begin: RankReading
    """The reading at the start of the interval."""
    used: tuple[float, float]


class Activity:
    """The idle time of the ranks of one run."""

    def __init__(self, idle: float) -> None:
        """Count intervals in which a rank uses up to `idle` seconds of CPU or GPU per second."""
        self._idle = idle
        self._ranks: dict[int, _Since] = {}

    def observe(self, at: float, ranks: Iterable[RankReading]) -> None:
        """Add the readings of the living ranks at one moment. A rank whose use is unknown is not idle."""
        known: dict[int, _Since] = {}
        for one in ranks:
            if (used := _used(one)) is None:
                continue
            since = self._ranks.get(one.rank)
            if since is None or (since.begin.began, since.begin.last_progress) != (one.began, one.last_progress):
                since = _Since(at, one, used)
            elif (elapsed := one.at - since.begin.at) >= INTERVAL:
                is_idle = used[0] - since.used[0] <= self._idle * elapsed and used[1] <= since.used[1]
                since = _Since(since.idle if is_idle else at, one, used)
            known[one.rank] = since
        self._ranks = known

    def idle_seconds(self, at: float) -> Mapping[int, float]:
        """Return how long each rank has been idle, without ranks whose use is unknown."""
        return {rank: at - one.idle for rank, one in self._ranks.items()}


def _used(reading: RankReading) -> tuple[float, float] | None:
    """Return the seconds of CPU and GPU that a rank has used, or waited for, and the bytes read; None if unknown."""
    process, gpu = reading.counters.process, reading.counters.gpu
    if process.cpu is None or process.workers_cpu is None or process.read_bytes is None:
        return None
    others = process.run_queue, process.workers_run_queue, gpu.busy
    return process.cpu + process.workers_cpu + sum(one or 0.0 for one in others), process.read_bytes
