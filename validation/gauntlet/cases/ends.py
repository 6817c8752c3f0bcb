"""Checkpoints, hangs, a job that does not start training, and one that crashes."""

from __future__ import annotations

from testing.stack import wait_for
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert, all_ranks, drawn_rank, one_rank

FIRST_CHECKPOINT_WITHIN = 30.0  # seconds


def stop_saving(arena: Arena, _target: Target) -> None:
    # A new job that has saved nothing yet has another limit: ten minutes.
    saved = "rankscope_rank_checkpoint_last_timestamp_seconds"
    wait_for(lambda: arena.stack.prometheus.query(saved), FIRST_CHECKPOINT_WITHIN)
    arena.change_ranks(common={"checkpoint_every": 0})


def stay_in_startup(arena: Arena, _target: Target) -> None:
    arena.start_job(stays_in_startup=True)
    arena.wait_for_ranks()
    arena.begin()


FAULTS = {
    # Every tenth step all ranks save, and do not train meanwhile.
    "f08_synchronous_checkpoints": Case(
        "synchronous checkpoints",
        all_ranks(lambda target: {"checkpoint_every": 10, "checkpoint": 10 * target.extra_ms}),
        alert("RankscopeCheckpointSlow"),
    ),
    # One rank hangs outside the collectives; the others wait for it in one.
    "f17_hang_outside": Case(
        "a hang outside a collective",
        one_rank(lambda _: {"hangs": True}),
        alert("RankscopeRankStuck"),
        drawn_rank,
        has_doses=False,
    ),
    # All ranks are in the same collective, which does not end.
    "f18_hang_inside": Case(
        "a hang inside a collective",
        all_ranks(lambda _: {"hangs_in_collective": True}),
        alert("RankscopeRankStuck"),
        has_doses=False,
    ),
    # A rank is killed; torchrun ends the others.
    "f19_killed_rank": Case(
        "a killed rank",
        lambda arena, target: arena.kill(target.rank),
        alert("RankscopeRankCrashed"),
        drawn_rank,
        has_doses=False,
    ),
    # A job has its ranks, but makes no step.
    "f20_slow_startup": Case(
        "start-up without an end",
        stay_in_startup,
        alert("RankscopeStartupSlow"),
        has_doses=False,
    ),
    # The ranks stop saving.
    "f23_checkpoint_overdue": Case(
        "checkpoint overdue",
        stop_saving,
        alert("RankscopeCheckpointOverdue"),
        has_doses=False,
    ),
}
