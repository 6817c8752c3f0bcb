"""What a fault or a decoy is: how it is injected, and which notification is right. `cases/` has all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from testing.job.control import STEP_MS, Behavior
from testing.job.device import ASYNCHRONOUS, DEVICES, GLOO
from testing.job.launch import RANKS
from validation.gauntlet.arena import Arena

LOUD = 1.4
"""How many times as long a step takes, if nothing else is said; 1.15 and 2 are the other doses."""


@dataclass(frozen=True)
class Target:
    """What the schedule has drawn: which rank or GPU, and how much."""

    rank: int = 1
    spare_gpu: int = RANKS
    dose: float = LOUD
    pace: float = 1.0
    """How many times as long as the gauntlet's the healthy steps are."""

    @property
    def extra_ms(self) -> float:
        """By which a step is longer."""
        return (self.dose - 1) * STEP_MS * self.pace

    @property
    def batch_ms(self) -> float:
        """Of a loader's worker that is slower than the steps."""
        return self.dose * STEP_MS * self.pace

    @property
    def slow_device(self) -> dict[str, float]:
        """The behavior of a rank whose device is that much slower."""
        return {
            "forward": Behavior.forward * self.pace + self.extra_ms / 3,
            "backward": Behavior.backward * self.pace + self.extra_ms * 2 / 3,
        }

    @property
    def preprocessing(self) -> dict[str, float]:
        """The behavior of loader workers that compute, one a rank: all the time if the machine has the processors.

        Where it has not, they compute a part of it, together on 0.7 of the processors: with all of them, what the ranks
        do would be disturbed as much as their data.
        """
        share = min(1.0, 0.7 * (os.cpu_count() or 1) / RANKS)
        return {"fetch_cpu": share * self.batch_ms, "fetch": (1 - share) * self.batch_ms}


def no_place(_: Target) -> dict[str, str]:
    """The run as a whole."""
    return {}


def the_rank(target: Target) -> dict[str, str]:
    """The rank that was drawn."""
    return {"rank": str(target.rank)}


def rank_zero(_: Target) -> dict[str, str]:
    """Rank 0, whatever was drawn."""
    return {"rank": "0"}


def its_gpu(target: Target) -> dict[str, str]:
    """The GPU of the rank that was drawn."""
    return {"gpu": str(target.rank)}


def the_rank_and_its_gpu(target: Target) -> dict[str, str]:
    """Both."""
    return {**the_rank(target), **its_gpu(target)}


def the_spare_gpu(target: Target) -> dict[str, str]:
    """The GPU without a rank that was drawn."""
    return {"gpu": str(target.spare_gpu)}


Inject = Callable[[Arena, Target], None]
BehaviorOf = Callable[[Target], dict[str, Any]]
"""The fields of a behavior (testing/job/control.py) that a fault changes, from what was drawn."""


def all_ranks(behavior: BehaviorOf) -> Inject:
    """Change the behavior of all ranks."""
    return lambda arena, target: arena.change_ranks(everybody=behavior(target))


def one_rank(behavior: BehaviorOf) -> Inject:
    """Change the behavior of the rank that was drawn."""
    return lambda arena, target: arena.change_ranks(ranks={target.rank: behavior(target)})


def first_rank(behavior: BehaviorOf) -> Inject:
    """Change the behavior of rank 0, whatever was drawn."""
    return lambda arena, target: arena.change_ranks(ranks={0: behavior(target)})


@dataclass(frozen=True)
class Case:
    """A fault, or without alerts a decoy. Healing is the same for all: `Arena.heal`."""

    title: str
    inject: Inject
    alerts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Which may tell it; the values of their label `cause` that are right, none if the name says it."""
    place: Callable[[Target], dict[str, str]] = no_place
    """Labels that the notification must have."""
    simulated: str = ""
    """What of it is not real, beside the time of the device."""
    has_doses: bool = True
    """Whether it makes steps longer by how much one wants."""
    devices: tuple[str, ...] = DEVICES
    """On which it is run: what is about ranks on both, what is about GPUs alone over gloo."""

    @property
    def is_decoy(self) -> bool:
        """Whether silence is right."""
        return not self.alerts


GPUS_ALONE = (GLOO,)
HOST_AND_DEVICE = (ASYNCHRONOUS,)  # only where the host runs ahead of the device

LAGGING = ("RankscopeRankLagging", "RankscopeRankZeroLagging")


def lagging(*causes: str) -> dict[str, frozenset[str]]:
    """A rank that holds the others up, for one of these causes."""
    return dict.fromkeys(LAGGING, frozenset(causes))


def alert(name: str, *causes: str) -> dict[str, frozenset[str]]:
    """One alert."""
    return {name: frozenset(causes)}
