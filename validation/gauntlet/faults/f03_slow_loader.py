"""One rank's data comes late; the others wait for it in the collective."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.tell(ranks={target.rank: {"fetch": target.batch_ms}})


CASE = Case(
    "one slow loader",
    inject,
    lagging("data_wait"),
    the_rank,
)
