"""A rank computes on the host, and shares its processor with others; the GPU's clocks are normal."""

from __future__ import annotations

from tests.gauntlet.arena import Arena
from tests.gauntlet.case import Case, Target, lagging, the_rank
from tests.gauntlet.control import Behaviour


def inject(arena: Arena, target: Target) -> None:
    # Its forward takes as long as before until two busy processes leave it a third of the processor.
    half = target.extra_ms / 2
    arena.tell(ranks={target.rank: {"forward": Behaviour.forward - half, "forward_cpu": half}})
    arena.crowd(target.rank)


CASE = Case(
    "CPU contention",
    inject,
    lagging("cpu_contention"),
    the_rank,
)
