"""Rank 0 gets everybody's weights, works on them and sends the result; its GPU is busier and fuller."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, rank_zero


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(0, busy=0.3, memory_used="15 GiB")
    arena.tell(everybody={"aggregate": target.extra_ms})


CASE = Case(
    "rank 0 aggregates",
    inject,
    lagging("aggregation"),
    rank_zero,
    simulated="its GPU's load and memory",
)
