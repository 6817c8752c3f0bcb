"""A GPU has lost NVLinks: the results of collectives come late to its rank."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, nvlinks_down=9)
    arena.tell(ranks={target.rank: {"transfer": target.extra_ms}})


CASE = Case(
    "one slow link",
    inject,
    alert("RankscopeTransferBound", "link"),
    the_rank,
    simulated="the links; the delay is slept in the collective",
)
