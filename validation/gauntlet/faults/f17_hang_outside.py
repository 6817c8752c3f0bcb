"""One rank stands still outside the collectives; the others wait for it in one."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.tell(ranks={target.rank: {"hangs": True}})


CASE = Case(
    "a hang outside a collective",
    inject,
    alert("RankscopeRankStuck"),
    the_rank,
    has_doses=False,
)
