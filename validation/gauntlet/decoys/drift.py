"""Devices differ by two percent."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target
from validation.gauntlet.control import Behaviour
from validation.gauntlet.training import RANKS


def inject(arena: Arena, target: Target) -> None:
    device_ms = Behaviour.forward + Behaviour.backward
    backward = [Behaviour.backward + share * device_ms for share in (-0.02, -0.01, 0.01, 0.02)]
    arena.tell(ranks={(rank + target.rank) % RANKS: {"backward": ms} for rank, ms in enumerate(backward)})


CASE = Case(
    "drift of two percent",
    inject,
    has_doses=False,
)
