"""A rank makes its steps, and its GPU is empty."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, ranks_busy=0, ranks_memory=0)


CASE = Case(
    "CPU fallback",
    inject,
    alert("RankscopeCpuFallback", "cpu_fallback"),
    the_rank,
    simulated="the empty GPU",
    has_doses=False,
    devices=GPUS_ALONE,
)
