"""Every gradient is infinite: each step is skipped, and the loss scale halves each time."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"overflows": True})


CASE = Case(
    "AMP scale collapse",
    inject,
    alert("RankscopeLossScaleCollapse"),
    has_doses=False,
)
