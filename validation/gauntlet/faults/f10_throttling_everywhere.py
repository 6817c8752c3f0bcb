"""All ranks compute slowly, as the clocks of all their GPUs are down and say why."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert
from validation.gauntlet.training import RANKS


def inject(arena: Arena, target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, throttle=["sw_power_cap"])
    arena.tell(everybody=target.slow_device)


CASE = Case(
    "throttling of all",
    inject,
    alert("RankscopeThrottled", "throttled"),
    simulated="clocks and reason",
)
