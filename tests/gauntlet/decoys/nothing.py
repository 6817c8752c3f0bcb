"""Healthy training."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.begin()


CASE = Case(
    "nothing at all",
    inject,
    has_doses=False,
)
