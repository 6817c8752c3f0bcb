"""A value is read each hundred steps; what the host does beside issuing is hidden behind the device's work."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import HOST_AND_DEVICE, Case, Target


def inject(arena: Arena, target: Target) -> None:
    arena.tell(everybody={"read_every": 100, "post": target.extra_ms})


CASE = Case(
    "a value read every hundred steps",
    inject,
    has_doses=False,
    devices=HOST_AND_DEVICE,
)
