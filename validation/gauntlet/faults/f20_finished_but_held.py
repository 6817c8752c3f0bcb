"""The job is over, and something that it left behind still holds memory of its GPU."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, its_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.job.finish()
    arena.hold_memory(target.rank, "20 GiB")


CASE = Case(
    "finished but held",
    inject,
    alert("RankscopeGpuMemoryHeldIdle"),
    its_gpu,
    simulated="the memory; its process is real",
    has_doses=False,
    devices=GPUS_ALONE,
)
