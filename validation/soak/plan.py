"""The plan of a soak: faults in two runs, and disturbances of the servers, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import RANKS
from validation.gauntlet.arena import GPUS
from validation.gauntlet.case import Case, Target
from validation.gauntlet.cases import all_cases

RUNS = (GLOO, ASYNCHRONOUS)
"""The runs: one on each kind of device, with its name."""

EXPORTER, PROMETHEUS, ALERTMANAGER = "exporter", "prometheus", "alertmanager"
KILL, RESTART, STOP, SLOW, FULL, FULL_AT_START, CLOCK = (
    "kill",
    "restart",
    "stop",
    "slow scrapes",
    "full",
    "full at a job's start",
    "clock",
)
PACE = 5.0  # steps of half a second: eight ranks together need less than one CPU
SETTLES = 180.0  # seconds before the first fault: the rules' windows
HOLDS = 390.0  # seconds: an alert within 135 s, half an interval and group_wait, then time to disturb it
HOW_LONG = {
    # After a hang, a run is given five minutes for an hour, because its own pauses set the limit.
    "f17_hang_outside": 450.0,
    "f18_hang_inside": 450.0,
    "f07_memory_held": 720.0,  # its limit is nine minutes
    "g1_xid": 60.0,  # an event, which alerts for a quarter of an hour
    FULL_AT_START: 120.0,
}
BETWEEN = 330.0  # seconds: longer than a resolve needs to its notification

ABOUT_RANKS = ("f03_slow_loader", "f09_rank_zero_works", "f10_throttling", "f17_hang_outside", "f19_killed_rank")
FAULTS = {
    GLOO: (*ABOUT_RANKS, "f07_memory_held", "f14_congested_network", "f20_finished_but_held", "g1_xid", "g2_lost_gpu"),
    ASYNCHRONOUS: (
        *ABOUT_RANKS,
        "f13_slow_link",
        "f14_congested_network",
        "f15_rotating_straggler",
        "f18_hang_inside",
        "f26_device_reads",
    ),
}

FIRST_CHAOS, CHAOS_EVERY = 90.0, (110.0, 190.0)  # seconds
DOWN = (5.0, 40.0)  # seconds; an exporter may be down for two minutes before it alerts
STOPPED = (5.0, 40.0)
DELAYS = (4.0, 14.0)  # seconds a scrape; the timeout is ten
SLOW_FOR = 50.0  # three scrapes
FULL_FOR = 60.0
CLOCK_BY = 90.0  # seconds, forward or back
CLOCK_FOR = 100.0


@dataclass(frozen=True)
class Slot:
    """A fault from `at` to `until`, in seconds from the start."""

    run: str
    name: str
    at: float
    until: float
    target: Target

    @property
    def case(self) -> Case | None:
        """The case of the gauntlet; None if nothing is wrong with the run, and no alert is right."""
        return all_cases().get(self.name)


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of `target` from `at` for `seconds`, in seconds from the start."""

    act: str
    target: str
    run: str
    """The run of the exporter, directory or clock; empty for Prometheus and Alertmanager."""
    at: float
    seconds: float
    amount: float = 0.0
    """Seconds of a scrape's delay, or of the clock's jump."""


def faults(seed: int, run: str, seconds: float) -> Iterator[Slot]:
    """Yield the faults of a run, one after the other, each kind at most once, until the time is used up."""
    chance = random.Random(f"{seed}/{run}")
    at = SETTLES + chance.uniform(0, 60)
    names = chance.sample(FAULTS[run], len(FAULTS[run]))
    names.insert(2, FULL_AT_START)
    for name in names:
        target = Target(chance.randrange(RANKS), chance.randrange(RANKS, GPUS), pace=PACE)
        until = at + HOW_LONG.get(name, HOLDS)
        if until + BETWEEN <= seconds:
            yield Slot(run, name, at, until, target)
            at = until + BETWEEN + chance.uniform(0, 30)


def chaos(seed: int, seconds: float) -> Iterator[Disturbance]:
    """Yield each kind of disturbance in each round. Each exporter survives half of the time, to measure its memory."""
    chance = random.Random(f"{seed}/chaos")
    at = FIRST_CHAOS
    last = seconds - BETWEEN / 2
    while at < last:
        for kind, target in chance.sample(_DECK, len(_DECK)):
            if at < last:
                drawn = _draw(chance, kind, target, at, RUNS[at > seconds / 2])
                yield drawn
                at = max(at + chance.uniform(*CHAOS_EVERY), at + drawn.seconds + 30)


_DECK = [(kind, target) for kind in (KILL, RESTART, STOP) for target in (EXPORTER, PROMETHEUS, ALERTMANAGER)]
_DECK += [(kind, EXPORTER) for kind in (SLOW, FULL, CLOCK)]


def _draw(chance: random.Random, kind: str, target: str, at: float, killable: str) -> Disturbance:
    run = killable if kind in (KILL, RESTART) else chance.choice(RUNS)
    run = run if target == EXPORTER else ""
    if kind == SLOW:
        return Disturbance(kind, target, run, at, SLOW_FOR, chance.choice(DELAYS))
    if kind == FULL:
        return Disturbance(kind, "run directory", run, at, FULL_FOR)
    if kind == CLOCK:
        return Disturbance(kind, target, run, at, CLOCK_FOR, chance.choice((-CLOCK_BY, CLOCK_BY)))
    return Disturbance(kind, target, run, at, chance.uniform(*(STOPPED if kind == STOP else DOWN)))
