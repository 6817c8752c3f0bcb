"""All ranks are in the same collective, and none comes out."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"hangs_in_collective": True})


CASE = Case(
    "a hang inside a collective",
    inject,
    alert("RankscopeRankStuck"),
    has_doses=False,
)
