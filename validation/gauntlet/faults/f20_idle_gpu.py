"""A rank has its model on its GPU, makes its steps, and runs no kernel there."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, the_rank_and_its_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, ranks_busy=0)


CASE = Case(
    "allocated, idle",
    inject,
    alert("RankscopeGpuAllocatedIdle"),
    the_rank_and_its_gpu,
    simulated="the idle GPU",
    has_doses=False,
    devices=GPUS_ALONE,
)
