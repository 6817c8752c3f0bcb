"""State of use of a GPU: a pure function from the facts at one moment to one of seven states."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rankscope.record import phases
from rankscope.record.snapshot import RankSnapshot

WORKING = "working"
FREE = "free"
ALLOCATED_NO_PROCESS = "allocated_no_process"
PROCESS_NO_WORK = "process_no_work"
MEMORY_HELD = "memory_held_by_dead"
SUSPECTED_HANG = "suspected_hang"
UNKNOWN = "unknown"
STATES = (WORKING, FREE, ALLOCATED_NO_PROCESS, PROCESS_NO_WORK, MEMORY_HELD, SUSPECTED_HANG, UNKNOWN)

# Longest pause that still counts as work: a step may take a minute, most of it one wait for data. The busy counter
# has the time in which kernels ran.
PAUSE = 60.0  # seconds

# A kernel seen within this time counts as running, even if no process is visible: the driver's sample period is up to
# 1 s, the sampler's another 1 s, and one reading may be late.
RUNNING_WITHIN = 3.0  # seconds

# Kernels of a rank may run, or be seen, for this long after its process was last seen.
LAST_KERNELS = 5.0  # seconds

# Share of memory in use while no process is listed. A bare context uses about half a GB, below 1% of a data-center GPU.
MEMORY_SHARE = 0.05

# Seconds without progress of a rank: the longest limits of a hang (diagnosis/thresholds.py).
STUCK_AFTER = 300.0  # NCCL's watchdog ends the job after its default of 600
STUCK_AFTER_PLANNED = 1800.0


@dataclass(frozen=True)
class Facts:
    """The facts about a GPU at one moment."""

    is_allocated: bool | None = False
    """True if a scheduler allocated it or a living rank names it; None if unknown."""
    processes: int | None = 0
    """Number of living processes on it; None if they are not visible."""
    dead: int = 0
    """Number of ended processes that the driver still lists."""
    memory: float | None = 0.0
    """Share of its memory in use."""
    idle_for: float | None = math.inf
    """Seconds since a kernel last ran, infinite if none ever did; None if the device does not report it."""
    is_stuck: bool = False
    """True if it has living ranks and none of them makes progress."""


def classify(facts: Facts) -> str:
    """Return one of STATES. Observed activity takes precedence over claims."""
    if facts.processes:
        return _with_process(facts)
    if facts.idle_for is not None and facts.idle_for <= RUNNING_WITHIN:
        return WORKING
    if facts.processes is None:
        return UNKNOWN
    if facts.dead or (facts.memory or 0.0) > MEMORY_SHARE:
        return MEMORY_HELD
    if facts.is_allocated is None:
        return UNKNOWN
    return ALLOCATED_NO_PROCESS if facts.is_allocated else FREE


def _with_process(facts: Facts) -> str:
    if facts.idle_for is None:
        return UNKNOWN
    if facts.idle_for > PAUSE:
        return PROCESS_NO_WORK
    return SUSPECTED_HANG if facts.is_stuck else WORKING


def are_stuck(ranks: Collection[RankSnapshot]) -> bool:
    """Return whether there are living ranks and none of them makes progress."""
    living = [rank for rank in ranks if rank.alive]
    return bool(living) and all(_is_stuck(rank) for rank in living)


def _is_stuck(rank: RankSnapshot) -> bool:
    limit = STUCK_AFTER_PLANNED if rank.phase in phases.PLANNED else STUCK_AFTER
    return rank.read_monotonic - rank.last_progress > limit


class UnusedSince(NamedTuple):
    """The time since which memory is not used, in monotonic seconds, and what happened then: one of SINCE."""

    at: float
    what: str


ALLOCATION, RANK, KERNEL = SINCE = ("allocation", "rank", "kernel")
"""The memory was allocated, the last rank ended, or the last kernel ran."""


class UnusedMemory:
    """The time since which memory of one GPU is in use without a kernel, although no rank is alive on it.

    A process that has run a kernel since the allocation and the end of the last rank is a service or a notebook, which
    may keep its memory between requests. So it is of interest what came last.
    """

    def __init__(self) -> None:
        self._since: UnusedSince | None = None
        """None if the memory was in use before anything else was seen, or a kernel has run since."""

    def update(self, at: float, memory: float | None, has_rank: bool, idle_for: float | None) -> UnusedSince | None:
        """Return that time; None while the memory is free or used, a rank is alive, or it is unknown.

        `at` is the time of these facts in monotonic seconds, `memory` the share in use.
        """
        if memory is not None and (has_rank or memory <= MEMORY_SHARE):
            self._since = UnusedSince(at + LAST_KERNELS, RANK) if has_rank else UnusedSince(at, ALLOCATION)
            return None
        if memory is None or idle_for is None:
            self._since = None
            return None
        if self._since and at - idle_for > self._since.at:
            self._since = None
        return self._since or (UnusedSince(at - idle_for, KERNEL) if PAUSE < idle_for < math.inf else None)
