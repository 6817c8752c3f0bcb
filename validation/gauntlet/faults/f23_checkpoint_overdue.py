"""No rank saves any more."""

from __future__ import annotations

from testing.stack import wait_for
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert

FIRST_WITHIN = 30.0  # seconds


def inject(arena: Arena, _target: Target) -> None:
    # A job that is new has saved nothing yet: that would be another limit, of ten minutes.
    wait_for(lambda: arena.stack.prometheus.query("run:rankscope_since_checkpoint:seconds"), FIRST_WITHIN)
    arena.tell(everybody={"checkpoint_every": 0})


CASE = Case(
    "checkpoint overdue",
    inject,
    alert("RankscopeCheckpointOverdue"),
    has_doses=False,
)
