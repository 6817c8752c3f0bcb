"""One rank's results come late, whoever came to the collective when."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, alert


def inject(arena: Arena, target: Target) -> None:
    arena.tell(ranks={target.rank: {"transfer": target.extra_ms}})


CASE = Case(
    "one slow link",
    inject,
    alert("RankscopeTransferBound", "link", "slow_link", "network", "transfer"),
    simulated="the delay, in a communication hook",
)
