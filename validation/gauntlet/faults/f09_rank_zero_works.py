"""Rank 0 does extra work (logging, upload, metrics) after each step, outside the model."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, rank_zero


def inject(arena: Arena, target: Target) -> None:
    arena.tell(ranks={0: {"post": target.extra_ms}})


CASE = Case(
    "rank 0 does extra work",
    inject,
    lagging("other"),
    rank_zero,
)
