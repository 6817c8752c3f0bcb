"""One rank's data comes late; the others wait for it in the collective."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, lagging, the_rank
from tests.gauntlet.control import STEP_MS


def inject(arena: Arena, target: Target) -> None:
    arena.tell(ranks={target.rank: {"fetch": target.dose * STEP_MS}})


CASE = Case(
    "one slow loader",
    inject,
    lagging("data_wait"),
    the_rank,
)
