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
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Draw = np.random.Generator
Array = npt.NDArray[np.float64]

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
RANKS_PER_NODE = 8
SIZES = {8: 0.74, 16: 0.2, 64: 0.05, 128: 0.01}  # promtool allows 10,000 samples in a query: at most 230 ranks
STEPS = {0.1: 0.15, 0.3: 0.2, 1.0: 0.3, 3.0: 0.2, 10.0: 0.1, 60.0: 0.05}
MOST_SAMPLES = 3e8  # ranks times steps of a day: larger runs have longer steps, as in reality
MOST_COLLECTING = 0.02  # ratio of the run's time in garbage collections of any rank: more is a fault

DOSES = (1.05, 1.1, 1.15, 1.3, 2.0)
FAULTS = {
    "slow rank": "RankscopeRankLagging",
    "rank 0 works": "RankscopeRankZeroLagging",
    "slow loaders": "RankscopeDataBound",
    "slow copies": "RankscopeCopyBound",
    "slow network": "RankscopeTransferBound",
    "rotating straggler": "RankscopeRotatingStraggler",
    "throttled GPUs": "RankscopeThrottled",
}
"""The right alert by fault. Each fault multiplies the step time by the dose."""
HANG = "hang"
ALERTS = {**FAULTS, HANG: "RankscopeRankStuck"}


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
    host: float = 0.5
    """Ratio of a step that the host of a device needs to issue it."""
    loader: float = 0.4
    """Ratio of the time in which a loader worker makes batches."""
    computing: float = 0.9
    """Ratio of that in which it computes, instead of waiting for storage."""
    events: tuple[SimulatedEvent, ...] = ()
    lengths_over_time: tuple[tuple[float, float], ...] = ()
    """Times from which steps take this factor longer: another sequence length or batch size."""
    caps: tuple[tuple[float, float, float], ...] = ()
    """Start, end and ratio by which the clocks of a whole rack are reduced."""
    skewed: Array = field(repr=False, default_factory=lambda: np.zeros(1))
    """Seconds that each node's clock is ahead."""
    fault: str = ""
    dose: float = 1.0
    onset: float = 0.0
    heals: float = 0.0
    culprit: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes of eight ranks."""
        return -(-self.ranks // RANKS_PER_NODE)

    @property
    def group(self) -> str:
        return f"0-{self.ranks - 1}"


def healthy(seed: int) -> Plan:
    """Return a day of a run without a fault."""
    draw = np.random.default_rng((15, seed))
    ranks = int(draw.choice(list(SIZES), p=list(SIZES.values())))
    fitting = [step for step in STEPS if ranks * DAY / step <= MOST_SAMPLES]
    weights = np.array([STEPS[step] for step in fitting])
    step = float(draw.choice(fitting, p=weights / weights.sum()) * draw.uniform(0.7, 1.4))
    plan = draw_run(f"day-{seed}", seed, ranks, step, draw)
    return replace(
        plan,
        events=tuple(sorted(draw_events(plan, draw), key=lambda one: one.at)),
        lengths_over_time=tuple((_within(draw), draw.uniform(0.5, 2.0)) for _ in range(draw.poisson(1.0))),
        caps=_caps(draw),
        skewed=_clocks(plan.nodes, draw),
    )


def faulty(fault: str, dose: float, number: int) -> Plan:
    """Return seventy minutes of a run: healthy, then with a fault for half an hour, then healed."""
    draw = np.random.default_rng((16, list(ALERTS).index(fault), round(100 * dose), number))
    ranks = int(draw.choice([8, 8, 8, 16]))
    step = between(draw, 0.1, 3.0)
    plan = draw_run(f"{fault} {dose:g} {number}".replace(" ", "-"), number, ranks, step, draw)
    onset = 30 * MINUTE + draw.uniform(0, MINUTE)
    culprit = 0 if fault == "rank 0 works" else int(draw.integers(1, ranks))
    times = {"seconds": 70 * MINUTE, "onset": onset, "heals": onset + 30 * MINUTE}
    return replace(plan, fault=fault, dose=dose, culprit=culprit, skewed=np.zeros(plan.nodes), **times)


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
        host=draw.uniform(0.2, 0.8),
        loader=draw.uniform(0.1, 0.6),
        computing=float(draw.choice([0.05, 0.9])),
    )


def draw_events(plan: Plan, draw: Draw) -> list[SimulatedEvent]:
    return [*_planned(plan, draw), *_accidents(plan, draw), *_failed_scrapes(plan, draw)]


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


def _failed_scrapes(plan: Plan, draw: Draw) -> Iterator[SimulatedEvent]:
    for node in range(plan.nodes):
        for at in _times(draw, 0.1):
            yield SimulatedEvent("exporter restart", at, draw.uniform(5, 90), node)
        for at in _times(draw, 1.5):
            yield SimulatedEvent("missed scrape", at, draw.choice([1, 1, 1, 2, 3]) * 15.0, node)
    for at in _times(draw, 0.2):
        yield SimulatedEvent("Prometheus restart", at, draw.uniform(20, 120))


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


def _caps(draw: Draw) -> tuple[tuple[float, float, float], ...]:
    """Return caps one after the other: of two at once, only the lower clock would count, not the sum."""
    caps, free = list[tuple[float, float, float]](), 0.0
    for begins, ends, part in sorted(_cap(draw) for _ in range(draw.poisson(0.5))):
        if max(begins, free) < ends:
            caps.append((max(begins, free), ends, part))
            free = ends
    return tuple(caps)


def _cap(draw: Draw) -> tuple[float, float, float]:
    begins = _within(draw)
    return begins, begins + draw.uniform(10, 180) * MINUTE, draw.uniform(0.02, 0.07)


def _clocks(nodes: int, draw: Draw) -> Array:
    """Return clock errors: NTP keeps most within milliseconds; one in fifty is not synchronized, and minutes off."""
    is_wrong = draw.random(nodes) < 0.02
    return np.where(is_wrong, draw.uniform(-300, 300, nodes), draw.normal(0, 0.01, nodes))
