"""A GPU reports an error of its hardware."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert, its_gpu


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, xid=48)


CASE = Case(
    "XID",
    inject,
    alert("RankscopeGpuXid"),
    its_gpu,
    simulated="the event",
    has_doses=False,
    devices=GPUS_ALONE,
)
