"""A value is read in each step, and the host has little else to do."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import HOST_AND_DEVICE, Case, Target

LITTLE_MS = 3.0


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"read_every": 1, "post": LITTLE_MS})


CASE = Case(
    "a cheap read in each step",
    inject,
    has_doses=False,
    devices=HOST_AND_DEVICE,
)
