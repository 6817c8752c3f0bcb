"""Healthy training."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.begin()


CASE = Case(
    "nothing at all",
    inject,
    has_doses=False,
)
