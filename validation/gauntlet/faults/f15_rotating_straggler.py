"""In each step another rank has more work."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"rotating": target.extra_ms})


CASE = Case(
    "uneven work",
    inject,
    alert("RankscopeRotatingStraggler", "uneven_work"),
)
