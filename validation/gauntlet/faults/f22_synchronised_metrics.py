"""After every batch the ranks agree on many single numbers."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    # Each takes a millisecond, or two on a busy machine.
    arena.tell(everybody={"small_collectives": round(target.extra_ms)})


CASE = Case(
    "metrics synchronised on every batch",
    inject,
    alert("RankscopeSmallCollectives"),
)
