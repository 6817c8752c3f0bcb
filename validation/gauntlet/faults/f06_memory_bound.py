"""GPUs are half idle and full; steps advance."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert
from validation.gauntlet.training import RANKS


def inject(arena: Arena, _target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, ranks_busy=0.4, ranks_memory=0.9)


CASE = Case(
    "memory-bound",
    inject,
    alert("RankscopeLowUtilisation", "memory_bound"),
    simulated="utilisation and memory",
    has_doses=False,
    devices=GPUS_ALONE,
)
