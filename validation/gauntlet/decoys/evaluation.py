"""All ranks evaluate for a while."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"evaluation": 5000})


CASE = Case(
    "an evaluation pass",
    inject,
    has_doses=False,
)
