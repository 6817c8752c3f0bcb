"""A rank ends without a word; torchrun ends the others."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.kill(target.rank)


CASE = Case(
    "a killed rank",
    inject,
    alert("RankscopeRankCrashed"),
    the_rank,
    has_doses=False,
)
