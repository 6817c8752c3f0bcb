"""The transfer takes longer for everybody; nobody comes late."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"transfer": target.extra_ms})


CASE = Case(
    "congested network",
    inject,
    alert("RankscopeTransferBound", "network"),
    simulated="the delay, slept in the collective",
)
