"""A new job whose first steps are slow, as when kernels are compiled."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.start_job(warm_up=300)
    arena.wait_for_ranks()
    arena.begin()


CASE = Case(
    "warm-up",
    inject,
    has_doses=False,
)
