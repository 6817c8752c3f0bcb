"""A process that is no rank holds memory of a GPU on which nothing runs."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, the_spare_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.hold_memory(target.spare_gpu, "20 GiB")


CASE = Case(
    "memory held, GPU idle",
    inject,
    alert("RankscopeGpuMemoryHeldIdle"),
    the_spare_gpu,
    simulated="the memory; its process is real",
    has_doses=False,
    devices=GPUS_ALONE,
)
