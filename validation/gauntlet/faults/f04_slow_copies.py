"""Copies to the GPU take long on every rank (unpinned memory); data is there in time."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"copy": target.extra_ms})


CASE = Case(
    "slow host-to-device copies",
    inject,
    alert("RankscopeCopyBound", "h2d_copy"),
    simulated="the copy is a phase of the script in which it sleeps",
)
