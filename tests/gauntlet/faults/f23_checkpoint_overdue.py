"""No rank saves any more."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"checkpoint_every": 0})


CASE = Case(
    "checkpoint overdue",
    inject,
    alert("RankscopeCheckpointOverdue"),
    has_doses=False,
)
