"""Rank 0 evaluates, the others wait for it."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(ranks={0: {"evaluation": 5000}})


CASE = Case(
    "an evaluation pass of rank 0 alone",
    inject,
    has_doses=False,
)
