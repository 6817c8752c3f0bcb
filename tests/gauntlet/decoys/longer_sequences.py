"""All ranks have more to compute."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody=target.slow_device)


CASE = Case(
    "uniformly longer sequences",
    inject,
)
