"""The host takes twice as long to issue the model's work, in many small launches, as the device takes to do it."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import HOST_AND_DEVICE, Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.tell(everybody={"issue": 2})


CASE = Case(
    "launch-bound",
    inject,
    alert("RankscopeLaunchBound", "launch"),
    simulated="a launch's cost is slept",
    has_doses=False,
    devices=HOST_AND_DEVICE,
)
