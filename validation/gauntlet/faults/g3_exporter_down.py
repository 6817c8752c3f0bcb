"""The exporter of the node has gone; the ranks train on."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import GPUS_ALONE, Case, Target, alert


def inject(arena: Arena, _target: Target) -> None:
    arena.stop_exporter()


CASE = Case(
    "no exporter",
    inject,
    alert("RankscopeExporterDown"),
    has_doses=False,
    devices=GPUS_ALONE,
)
