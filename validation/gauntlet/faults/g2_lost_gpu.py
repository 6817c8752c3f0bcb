"""A GPU that nobody uses no longer answers."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, the_spare_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.spare_gpu, lost=True)


CASE = Case(
    "a lost GPU",
    inject,
    alert("RankscopeGpuLost"),
    the_spare_gpu,
    simulated="all of it",
    has_doses=False,
    devices=GPUS_ALONE,
)
