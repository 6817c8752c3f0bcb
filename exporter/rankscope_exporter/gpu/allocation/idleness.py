"""What a GPU's time goes to: from what is known at one moment to one of seven states, as a pure function."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

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

# Those that say so are the same as in deploy/prometheus/thresholds.yml, by a test: the exporter's wheel has no deploy/.

# A pause of a process's work that still counts as work: a step may take a minute, and most of it may be one wait for
# data. For how much of the time kernels ran there is the busy counter.
PAUSE = 60.0  # seconds

# A kernel that was seen no longer ago than this is running, also where no process is seen: the driver's sample period
# is up to 1 s, the sampler's another, and one may be late.
RUNNING_WITHIN = 3.0  # seconds

# Of the memory, in use while no process is listed. A bare context has about half a GB, below 1 % of a data-center GPU.
MEMORY_SHARE = 0.05  # the threshold gpu_memory_held

# Seconds without progress of a rank, for the reasons that the thresholds give.
STUCK_AFTER = 300.0  # the threshold stuck_for; NCCL's watchdog ends the job after its default of 600
STUCK_AFTER_PLANNED = 1800.0  # the threshold planned_phase_for


@dataclass(frozen=True)
class Facts:
    """What is known of a GPU at one moment."""

    allocated: bool | None = False
    """Whether a scheduler has given it to somebody or a living rank names it; None if that cannot be told now."""
    processes: int | None = 0
    """Living processes on it; None where they cannot be seen."""
    dead: int = 0
    """Processes that the driver lists and that live no more."""
    memory: float | None = 0.0
    """The share of its memory that is in use."""
    idle_for: float | None = math.inf
    """Seconds since a kernel was last seen, infinite if none ever was; None if the device does not tell."""
    is_stuck: bool = False
    """Whether it has living ranks of which none makes progress."""


def classify(facts: Facts) -> str:
    """One of STATES. What a GPU does comes before what is said about it."""
    if facts.processes:
        return _with_process(facts)
    if facts.idle_for is not None and facts.idle_for <= RUNNING_WITHIN:
        return WORKING
    if facts.processes is None:
        return UNKNOWN
    if facts.dead or (facts.memory or 0.0) > MEMORY_SHARE:
        return MEMORY_HELD
    if facts.allocated is None:
        return UNKNOWN
    return ALLOCATED_NO_PROCESS if facts.allocated else FREE


def _with_process(facts: Facts) -> str:
    if facts.idle_for is None:
        return UNKNOWN
    if facts.idle_for > PAUSE:
        return PROCESS_NO_WORK
    return SUSPECTED_HANG if facts.is_stuck else WORKING


def are_stuck(ranks: Collection[RankSnapshot]) -> bool:
    """Whether there are living ranks and none of them makes progress: one that does shows that work goes on."""
    living = [rank for rank in ranks if rank.alive]
    return bool(living) and all(_is_stuck(rank) for rank in living)


def _is_stuck(rank: RankSnapshot) -> bool:
    limit = STUCK_AFTER_PLANNED if rank.phase in phases.PLANNED else STUCK_AFTER
    return rank.read_monotonic - rank.last_progress > limit
