"""The job ends in order."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.begin()
    arena.job.finish()


CASE = Case(
    "a clean finish",
    inject,
    has_doses=False,
)
