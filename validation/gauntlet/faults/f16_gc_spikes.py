"""Every tenth step a garbage collection holds up a random rank: the slowest steps grow, the median does not."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"collect_every": 10, "collect": 10 * target.extra_ms})


CASE = Case(
    "garbage-collection spikes",
    inject,
    alert("RankscopeRotatingStraggler", "gc"),
    simulated="a collection's length is slept",
)
