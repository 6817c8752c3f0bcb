"""The job is ended with SIGTERM and started again."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.begin()
    arena.start_job()


CASE = Case(
    "a planned restart",
    inject,
    has_doses=False,
)
