"""GPUs are half idle and half empty, and no wait explains it."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert
from validation.gauntlet.training import RANKS


def inject(arena: Arena, _target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, ranks_busy=0.4, ranks_memory=0.3)


CASE = Case(
    "batch too small",
    inject,
    alert("RankscopeLowUtilisation", "batch_too_small"),
    simulated="utilisation and memory",
    has_doses=False,
    devices=GPUS_ALONE,
)
