"""A job of a newer version of the hook has a record that the exporter cannot read."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.publish_of_another_version()


CASE = Case(
    "a record of another version",
    inject,
    alert("RankscopeRanksHidden"),
    simulated="the record: its header, and nothing in it",
    has_doses=False,
    devices=GPUS_ALONE,
)
