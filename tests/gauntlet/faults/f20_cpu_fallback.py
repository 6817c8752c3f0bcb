"""The job makes its steps, and its GPUs are empty."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, alert
from tests.gauntlet.training import RANKS


def inject(arena: Arena, _target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, ranks_busy=0, ranks_memory=0)


CASE = Case(
    "CPU fallback",
    inject,
    alert("RankscopeCpuFallback", "cpu_fallback"),
    simulated="the empty GPUs",
    has_doses=False,
)
