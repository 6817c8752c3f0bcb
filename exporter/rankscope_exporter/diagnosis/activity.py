"""The idle time of each rank: its processes use no CPU time and read no storage, and its GPU runs no kernel.

A rank that loads, compiles or indexes is not idle. A rank that sleeps, waits for a lock, or whose loader is deadlocked
is idle. So is a rank that waits for another service, or downloads very slowly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope_exporter.diagnosis.readings import RankReading

INTERVAL = 10.0
"""Seconds over which the use is averaged. A shorter interval would count a garbage collection as work."""


@dataclass
class _Rank:
    began: float
    """The start of its process."""
    progress: float
    idle_since: float
    interval_since: float
    used: float
    """Seconds that it had used at the start of the interval."""
    read: float


class Activity:
    """The idle time of the ranks of one run."""

    def __init__(self, idle: float) -> None:
        """Count intervals in which a rank uses up to `idle` seconds of CPU or GPU per second."""
        self._idle = idle
        self._ranks: dict[int, _Rank] = {}

    def observe(self, at: float, ranks: Iterable[RankReading]) -> None:
        """Add the readings of the living ranks at one moment. A rank whose use is unknown is not idle."""
        known: dict[int, _Rank] = {}
        for one in ranks:
            used, read = _used(one), one.counters.process.read_bytes
            if used is None or read is None:
                continue
            before = self._ranks.get(one.rank)
            if before is None or before.began != one.began or before.progress != one.last_progress:
                before = _Rank(one.began, one.last_progress, at, at, used, read)
            elif (elapsed := at - before.interval_since) >= INTERVAL:
                if used - before.used > self._idle * elapsed or read > before.read:
                    before.idle_since = at
                before.interval_since, before.used, before.read = at, used, read
            known[one.rank] = before
        self._ranks = known

    def idle_seconds(self, at: float) -> Mapping[int, float]:
        """Return how long each rank has been idle, without ranks whose use is unknown."""
        return {rank: at - one.idle_since for rank, one in self._ranks.items()}


def _used(reading: RankReading) -> float | None:
    """Return the seconds of CPU and GPU that a rank has used, and waited for a CPU; None if they are not known."""
    process, gpu = reading.counters.process, reading.counters.gpu
    if process.cpu is None or process.workers_cpu is None:
        return None
    others = process.run_queue, process.workers_run_queue, gpu.busy
    return process.cpu + process.workers_cpu + sum(one or 0.0 for one in others)
