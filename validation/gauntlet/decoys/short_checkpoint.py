"""One checkpoint of a second and a half."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"checkpoint_every": 100, "checkpoint": 1500})


CASE = Case(
    "a short checkpoint",
    inject,
    has_doses=False,
)
