"""A job has its ranks, and makes no step."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.start_job(stays_in_startup=True)
    arena.wait_for_ranks()
    arena.begin()


CASE = Case(
    "start-up without an end",
    inject,
    alert("RankscopeStartupSlow"),
    has_doses=False,
)
