"""All ranks have more to compute."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody=target.slow_device)


CASE = Case(
    "uniformly longer sequences",
    inject,
)
