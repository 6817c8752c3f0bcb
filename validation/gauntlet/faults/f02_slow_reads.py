"""Data wait is up on every rank, and the loader workers sit idle: storage is slow."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"fetch": target.batch_ms})


CASE = Case(
    "slow remote reads",
    inject,
    alert("RankscopeDataBound", "io"),
)
