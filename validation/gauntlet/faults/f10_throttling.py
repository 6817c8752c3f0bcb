"""One rank's computation is slow, its GPU's clock is down and says why."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, throttle=["sw_thermal_slowdown", "hw_thermal_slowdown"], temperature=91)
    arena.tell(ranks={target.rank: target.slow_device})


CASE = Case(
    "thermal throttling",
    inject,
    lagging("throttled"),
    the_rank,
    simulated="clock, reason and temperature",
)
