"""A scheduler has given a GPU to somebody who runs nothing on it."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, the_spare_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.claim(target.spare_gpu)


CASE = Case(
    "allocated, never used",
    inject,
    alert("RankscopeGpuUnused"),
    the_spare_gpu,
    simulated="the scheduler's file",
    has_doses=False,
    devices=GPUS_ALONE,
)
