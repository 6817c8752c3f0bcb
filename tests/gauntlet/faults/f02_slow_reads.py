"""Data wait is up on every rank, and the loader workers sit idle: storage is slow."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, alert
from tests.gauntlet.control import STEP_MS


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"fetch": target.dose * STEP_MS})


CASE = Case(
    "slow remote reads",
    inject,
    alert("RankscopeDataBound", "io"),
)
