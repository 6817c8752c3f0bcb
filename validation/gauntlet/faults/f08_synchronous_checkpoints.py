"""Every tenth step all ranks save, and train no further meanwhile."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"checkpoint_every": 10, "checkpoint": 10 * target.extra_ms})


CASE = Case(
    "synchronous checkpoints",
    inject,
    alert("RankscopeCheckpointSlow"),
)
