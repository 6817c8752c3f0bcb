"""Data wait is up on every rank, and the loader workers compute."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody=target.preprocessing)


CASE = Case(
    "CPU-heavy preprocessing",
    inject,
    alert("RankscopeDataBound", "cpu"),
)
