"""Another process computes on a rank's GPU, and the rank is slower."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, the_rank


def inject(arena: Arena, target: Target) -> None:
    arena.hold_memory(target.rank, "8 GiB")
    arena.change_gpu(target.rank, busy=0.3)
    arena.tell(ranks={target.rank: target.slow_device})


CASE = Case(
    "an intruder on the GPU",
    inject,
    lagging("intruder"),
    the_rank,
    simulated="the intruder's work and memory; its process is real",
)
