"""The properties of a simulated run, drawn reproducibly from a seed.

Sizes, rates and tails follow published figures where they exist, and are wide guesses otherwise:

- Restarts, and a network that is slower by day: Llama 3 (arXiv:2407.21783, section 3.3.4): 466 interruptions in 54
  days, throughput that varies by 1 to 2% with the time of day. Here the transfer itself swings by up to 30%.
- Batches of unequal length, and garbage collections of a few hundred milliseconds in random ranks:
  "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv:2505.05713).
- Long pauses of a loader: lognormal, as the tails of latencies of shared storage (Dean and Barroso, "The Tail at
  Scale", 2013): one in a hundred is ten times as long as the median.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Draw = np.random.Generator
Array = npt.NDArray[np.float64]

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
MOST_COLLECTING = 0.02  # ratio of the run's time in garbage collections of any rank: more is a fault

DOSES = (1.05, 1.1, 1.15, 1.3, 2.0)


@dataclass(frozen=True)
class SimulatedEvent:
    """Something that happens once and takes some seconds, on all ranks or on one; `kind` says what."""

    kind: str
    at: float
    seconds: float
    rank: int | None = None


@dataclass(frozen=True)
class Plan:
    """All random values of a run. Times are seconds, noise is the standard deviation of a logarithm."""

    name: str
    seed: int
    ranks: int
    step: float
    """Seconds of the slowest rank, without transfer and noise."""
    clock: str
    seconds: float = DAY
    speed: Array = field(repr=False, default_factory=lambda: np.ones(8))
    """The relative duration of each rank's work, within 2%."""
    noise: float = 0.02
    """Noise of each rank's work in each step."""
    lengths: float = 0.0
    """Common noise of all ranks' work in each step: batches of unequal length."""
    imbalance: float = 0.0
    """Noise of each rank's work, for the same reason."""
    transfer: float = 0.1
    """Ratio of a step."""
    swing: float = 0.0
    """Variation of the transfer over a day."""
    data_wait: float = 0.005
    """Ratio of a step."""
    collect_every: float = 300.0
    """Steps of a rank between two garbage collections."""
    collect: float = 0.05
    """Seconds."""
    loader: float = 0.4
    """Ratio of the time in which a loader worker makes batches."""
    computing: float = 0.9
    """Ratio of that in which it computes, instead of waiting for storage."""
    events: tuple[SimulatedEvent, ...] = ()
    dose: float = 1.0


def draw_run(name: str, seed: int, ranks: int, step: float, draw: Draw) -> Plan:
    is_even = draw.random() < 0.5
    collect = draw.uniform(0.02, 0.3)
    return Plan(
        name,
        seed,
        ranks,
        step,
        clock=str(draw.choice(["device", "host"], p=[0.7, 0.3])),
        speed=np.clip(draw.normal(1.0, 0.01, ranks), 0.98, 1.02),
        noise=draw.uniform(0.003, 0.03),
        lengths=0.0 if is_even else draw.uniform(0.05, 0.3),
        imbalance=0.0 if is_even else draw.uniform(0.0, 0.03),
        transfer=draw.uniform(0.01, 0.2),
        swing=draw.uniform(0.0, 0.3),
        data_wait=draw.uniform(0.001, 0.01),
        collect_every=max(draw.uniform(50, 1000), ranks * collect / (MOST_COLLECTING * step)),
        collect=collect,
        loader=draw.uniform(0.1, 0.6),
        computing=float(draw.choice([0.05, 0.9])),
    )


def draw_events(plan: Plan, draw: Draw) -> list[SimulatedEvent]:
    return [*_planned(plan, draw), *_accidents(plan, draw)]


def _planned(plan: Plan, draw: Draw) -> Iterator[SimulatedEvent]:
    """Yield a run's checkpoints, similar but for a tail and 2% of its time, and its evaluations."""
    every = between(draw, 15 * MINUTE, 3 * HOUR)
    typical = min(between(draw, 2.0, 180.0), 0.02 * every)
    rank = _one_rank(plan, draw, 0.3)
    for at in np.arange(draw.uniform(0, every), DAY, every):
        yield SimulatedEvent("checkpoint", float(at), typical * draw.lognormal(0, 0.25), rank)
    if draw.random() < 0.6:
        every = between(draw, 30 * MINUTE, 6 * HOUR)
        typical = between(draw, 20.0, min(900.0, 0.2 * every))
        rank = _one_rank(plan, draw, 0.3)
        for at in np.arange(draw.uniform(0, every), DAY, every):
            yield SimulatedEvent("evaluation", float(at), typical * draw.lognormal(0, 0.1), rank)


def _accidents(plan: Plan, draw: Draw) -> Iterator[SimulatedEvent]:
    """Yield unplanned events that end by themselves."""
    for at in _times(draw, 24 * draw.uniform(0.2, 2.0)):
        yield SimulatedEvent("data_wait", at, 0.5 * draw.lognormal(0, 1.0), _one_rank(plan, draw, 0.9))
    for at in _times(draw, 0.5):
        yield SimulatedEvent("compilation", at, 10 * draw.lognormal(0, 0.5))
    for at in _times(draw, 0.7):
        yield SimulatedEvent("restart", at, min(45 * draw.lognormal(0, 0.8), 8 * MINUTE))


def _one_rank(plan: Plan, draw: Draw, part: float) -> int | None:
    """Return one rank with this probability, half of the time the first one; else None for all."""
    return int(draw.choice([0, draw.integers(plan.ranks)])) if draw.random() < part else None


def between(draw: Draw, least: float, most: float) -> float:
    """Return a log-uniform value: from one to two is as likely as from two to four."""
    return float(np.exp(draw.uniform(np.log(least), np.log(most))))


def _times(draw: Draw, a_day: float) -> list[float]:
    return [_within(draw) for _ in range(draw.poisson(a_day))]


def _within(draw: Draw) -> float:
    return float(draw.uniform(0, DAY))
