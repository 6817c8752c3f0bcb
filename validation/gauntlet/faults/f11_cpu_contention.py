"""A rank computes on the host, and shares its processor with others; the GPU's clocks are normal."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, lagging, the_rank
from validation.gauntlet.control import Behaviour

HOGS = 3
AT_ONCE_MS = 10  # that a thread which has slept computes before it has to share (measured here, with Linux 6.18)


def inject(arena: Arena, target: Target) -> None:
    # It computes a part of what was its device's time: as long as before, while the processor is its own.
    computed = AT_ONCE_MS + target.extra_ms / HOGS
    forward = min(computed, Behaviour.forward)
    slept = {"forward": Behaviour.forward - forward, "backward": Behaviour.backward - (computed - forward)}
    arena.tell(ranks={target.rank: {**slept, "forward_cpu": computed}})
    arena.crowd(target.rank, HOGS)


CASE = Case(
    "CPU contention",
    inject,
    lagging("cpu_contention"),
    the_rank,
)
