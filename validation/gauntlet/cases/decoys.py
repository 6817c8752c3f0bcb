"""Decoys: they look like faults, and no alert is right."""

from __future__ import annotations

from functools import partial

from testing.job.control import Behavior
from testing.job.launch import RANKS
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import HOST_AND_DEVICE, Case, Target, all_ranks, first_rank

Decoy = partial(Case, has_doses=False)


def finish(arena: Arena, _target: Target) -> None:
    arena.begin()
    arena.job.finish()


def drift(arena: Arena, target: Target) -> None:
    device_ms = Behavior.forward + Behavior.backward
    backward = [Behavior.backward + share * device_ms for share in (-0.02, -0.01, 0.01, 0.02)]
    arena.change_ranks(ranks={(rank + target.rank) % RANKS: {"backward": ms} for rank, ms in enumerate(backward)})


def restart(arena: Arena, _target: Target) -> None:
    arena.begin()
    arena.start_job()


def warm_up(arena: Arena, _target: Target) -> None:
    arena.start_job(warm_up=300)
    arena.wait_for_ranks()
    arena.begin()


def reach_power_limit(arena: Arena, target: Target) -> None:
    for rank in range(RANKS):
        arena.change_gpu(rank, throttle=["sw_power_cap"])
    all_ranks(lambda target: target.slow_device)(arena, target)


DECOYS = {
    # Gradients are accumulated over four micro-batches.
    "accumulation": Decoy("gradient accumulation", all_ranks(lambda _: {"micro_steps": 4})),
    # A value is read in each step, and the host has little else to do.
    "cheap_reads": Decoy(
        "a cheap read in each step",
        all_ranks(lambda _: {"read_every": 1, "post": 3.0}),
        devices=HOST_AND_DEVICE,
    ),
    # The job ends normally.
    "clean_finish": Decoy("a clean finish", finish),
    # Devices differ by two percent.
    "drift": Decoy("drift of two percent", drift),
    # All ranks evaluate for a while.
    "evaluation": Decoy("an evaluation pass", all_ranks(lambda _: {"evaluation": 5000})),
    # Rank 0 evaluates, the others wait for it.
    "evaluation_on_rank_zero": Decoy("an evaluation pass of rank 0 alone", first_rank(lambda _: {"evaluation": 5000})),
    # All ranks have more to compute.
    "longer_sequences": Case("uniformly longer sequences", all_ranks(lambda target: target.slow_device)),
    # At their default power limit, GPUs with a full load have lower clocks.
    "power_limit": Case("GPUs at their default power limit", reach_power_limit, simulated="clocks and reason"),
    # Healthy training.
    "nothing": Decoy("nothing at all", lambda arena, _: arena.begin()),
    # The job is ended with SIGTERM and started again.
    "planned_restart": Decoy("a planned restart", restart),
    # A value is read every hundred steps; the device's work hides the host's extra work.
    "rare_reads": Decoy(
        "a value read every hundred steps",
        # Not longer, because a simulated GPU is idle while its rank's host is in `other`.
        all_ranks(lambda _: {"read_every": 100, "post": 20.0}),
        devices=HOST_AND_DEVICE,
    ),
    # One checkpoint of a second and a half.
    "short_checkpoint": Decoy("a short checkpoint", all_ranks(lambda _: {"checkpoint_every": 100, "checkpoint": 1500})),
    # A new job whose first steps are slow, as with kernel compilation.
    "warm_up": Decoy("warm-up", warm_up),
}
