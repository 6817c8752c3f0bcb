"""A value is read each hundred steps; what the host does beside issuing is hidden behind the device's work."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import HOST_AND_DEVICE, Case, Target

HIDDEN_MS = 20.0  # no more, as the simulated GPUs idle while their ranks' hosts are in `other`


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"read_every": 100, "post": HIDDEN_MS})


CASE = Case(
    "a value read every hundred steps",
    inject,
    has_doses=False,
    devices=HOST_AND_DEVICE,
)
