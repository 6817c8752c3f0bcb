"""Gradients are accumulated over four micro-batches."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"micro_steps": 4})


CASE = Case(
    "gradient accumulation",
    inject,
    has_doses=False,
)
