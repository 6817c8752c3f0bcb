"""A fault or a decoy: how it is injected, and which notification is right. `cases/` has all of them."""

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
"""The default factor of the step time; 1.15 and 2 are the other doses."""


@dataclass(frozen=True)
class Target:
    """The rank, GPU and dose that the schedule has drawn."""

    rank: int = 1
    spare_gpu: int = RANKS
    dose: float = LOUD
    pace: float = 1.0
    """Factor of the healthy step time, relative to the gauntlet's."""

    @property
    def extra_ms(self) -> float:
        """Milliseconds added to a step."""
        return (self.dose - 1) * STEP_MS * self.pace

    @property
    def batch_ms(self) -> float:
        """Milliseconds a batch of a loader worker that is slower than the steps."""
        return self.dose * STEP_MS * self.pace

    @property
    def slow_device(self) -> dict[str, float]:
        """The behavior of a rank with a slower device."""
        return {
            "forward": Behavior.forward * self.pace + self.extra_ms / 3,
            "backward": Behavior.backward * self.pace + self.extra_ms * 2 / 3,
        }

    @property
    def preprocessing(self) -> dict[str, float]:
        """The behavior of loader workers that compute, one a rank: all the time if there are enough CPUs.

        With fewer CPUs they compute a part of the time, on 70% of the CPUs: using all would slow down the ranks, too.
        """
        share = min(1.0, 0.7 * (os.cpu_count() or 1) / RANKS)
        return {"fetch_cpu": share * self.batch_ms, "fetch": (1 - share) * self.batch_ms}


def no_place(_: Target) -> dict[str, str]:
    """Return no labels: the fault is in the run as a whole."""
    return {}


def drawn_rank(target: Target) -> dict[str, str]:
    """Return the rank that was drawn."""
    return {"rank": str(target.rank)}


def rank_zero(_: Target) -> dict[str, str]:
    """Return rank 0, whatever was drawn."""
    return {"rank": "0"}


def drawn_gpu(target: Target) -> dict[str, str]:
    """Return the GPU of the rank that was drawn."""
    return {"gpu": str(target.rank)}


def drawn_rank_and_gpu(target: Target) -> dict[str, str]:
    """Return the rank that was drawn and its GPU."""
    return {**drawn_rank(target), **drawn_gpu(target)}


def drawn_spare_gpu(target: Target) -> dict[str, str]:
    """Return the GPU without a rank that was drawn."""
    return {"gpu": str(target.spare_gpu)}


Inject = Callable[[Arena, Target], None]
BehaviorOf = Callable[[Target], dict[str, Any]]
"""The fields of a behavior (testing/job/control.py) that a fault changes, for a target."""


def all_ranks(behavior: BehaviorOf) -> Inject:
    return lambda arena, target: arena.change_ranks(common=behavior(target))


def one_rank(behavior: BehaviorOf) -> Inject:
    """Change the behavior of the rank that was drawn."""
    return lambda arena, target: arena.change_ranks(ranks={target.rank: behavior(target)})


def first_rank(behavior: BehaviorOf) -> Inject:
    """Change the behavior of rank 0, whatever was drawn."""
    return lambda arena, target: arena.change_ranks(ranks={0: behavior(target)})


@dataclass(frozen=True)
class Case:
    """A fault, or a decoy if it has no alerts. Healing is the same for all: `Arena.heal`."""

    title: str
    inject: Inject
    alerts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The alerts that may report it, with the right values of their label `cause`; none if the name has the cause."""
    place: Callable[[Target], dict[str, str]] = no_place
    """Labels that the notification must have."""
    simulated: str = ""
    """The parts that are not real, in addition to the time of the device."""
    has_doses: bool = True
    """Whether the dose sets how much longer a step takes."""
    healthy_seconds: float = 0.0
    """Seconds of training before the onset after which the run's usual loss is known."""
    notified_within: float = 60.0
    """Seconds from the onset; a later notification does not count."""
    devices: tuple[str, ...] = DEVICES
    """The devices on which it runs: cases about ranks on both, cases about GPUs alone over gloo."""

    @property
    def is_decoy(self) -> bool:
        """Return whether no notification is right."""
        return not self.alerts


GPUS_ALONE = (GLOO,)
HOST_AND_DEVICE = (ASYNCHRONOUS,)  # only where the host runs ahead of the device

LAGGING = ("RankscopeRankLagging", "RankscopeRankZeroLagging")


def lagging(*causes: str) -> dict[str, frozenset[str]]:
    """Return the alerts for a rank that slows down the others, for one of these causes."""
    return dict.fromkeys(LAGGING, frozenset(causes))


def alert(name: str, *causes: str) -> dict[str, frozenset[str]]:
    """Return one alert with its right causes."""
    return {name: frozenset(causes)}
