"""Facts: what the ranks of a run did over a window, and how they compare.

In synchronous training all ranks have the same step time. The straggler is the rank that waits least in collectives:
the others wait for it. Its lag is what the middle of its group waits beyond it, as a ratio of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

from rankscope.record import phases
from rankscope_exporter.diagnosis.readings import Counters, RankReading, Run, spent

Peers = tuple[str, int | None]
"""A group and a stage: ranks that have both in common do the same work, and are compared."""
WAIT = "collective_wait"
HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class RankFacts:
    """One living rank over a window. Ratios are of the window, unless a name says otherwise."""

    now: RankReading
    seconds: float
    """Of the training thread in the window."""
    spent: Counters
    """What its counters increased by."""
    clock: str = HOST
    """By which its group is judged: `host`, or `device` where all of its ranks have steps that were measured on it."""
    lag: float | None = None
    """What its peers would save if it were like them, as a ratio of the step. None without peers."""

    @property
    def rank(self) -> int:
        """Return its number."""
        return self.now.rank

    @property
    def peers(self) -> Peers:
        """Return who does the same work."""
        return self.now.group, self.now.stage

    @cached_property
    def host_ratios(self) -> Mapping[str, float]:
        """Time of the training thread by phase."""
        return {phase: seconds / self.seconds for phase, seconds in self.spent.phases.items()}

    @cached_property
    def device_scale(self) -> float:
        """Return the ratio of the window per second that was measured on the device. 0 where the host judges."""
        measured = sum(_unplanned(self.spent.device_phases).values())
        return sum(_unplanned(self.host_ratios).values()) / measured if self.clock == DEVICE and measured else 0.0

    @cached_property
    def ratios(self) -> Mapping[str, float]:
        """Time by phase, by the clock that judges. Planned phases are always the host's."""
        if not self.device_scale:
            return self.host_ratios
        planned = {phase: ratio for phase, ratio in self.host_ratios.items() if phase in phases.PLANNED}
        measured = _unplanned(self.spent.device_phases)
        return planned | {phase: seconds * self.device_scale for phase, seconds in measured.items()}

    @cached_property
    def step_ratios(self) -> Mapping[str, float]:
        """Time by phase in steps without a planned phase: in the steps that were compared, if there are any."""
        unplanned = _unplanned(self.ratios)
        total = sum(unplanned.values())
        of_all = {phase: ratio / total for phase, ratio in unplanned.items()} if total else {}
        aligned = self.spent.aligned
        if aligned.seconds <= 0.0:
            return of_all
        # The steps' rings do not have the phases of the script's own.
        own = {phase: ratio for phase, ratio in of_all.items() if phase not in phases.NAMES}
        return own | {phase: seconds / aligned.seconds for phase, seconds in aligned.phases.items()}

    @property
    def wait(self) -> float:
        """Return what it waited in collectives, as a ratio of its steps."""
        aligned = self.spent.aligned
        if aligned.seconds > 0.0:
            return (aligned.wait_floor + aligned.skew) / aligned.seconds
        return self.step_ratios.get(WAIT, 0.0)

    @property
    def planned_ratio(self) -> float:
        """Return its time in planned phases."""
        return sum(self.host_ratios.get(phase, 0.0) for phase in phases.PLANNED)

    @property
    def stalled(self) -> float:
        """Return the seconds since it last made progress."""
        return self.now.at - self.now.last_progress

    def rate(self, counted: float | None) -> float | None:
        """Return a counter's increase per second."""
        return None if counted is None else counted / self.seconds


@dataclass(frozen=True)
class RunFacts:
    """The ranks of one run over a window."""

    run: Run
    ranks: tuple[RankFacts, ...]
    """Those that live, by number."""
    ended: tuple[RankReading, ...] = ()

    @cached_property
    def peers(self) -> Mapping[Peers, Sequence[RankFacts]]:
        """The living ranks by those that they are compared with."""
        return _by_peers(self.ranks)

    @cached_property
    def stages(self) -> Mapping[int, Sequence[RankFacts]]:
        """The living ranks by their stage of the pipeline. Empty without one."""
        stages: dict[int, list[RankFacts]] = defaultdict(list)
        for one in self.ranks:
            if one.now.stage is not None:
                stages[one.now.stage].append(one)
        return stages if len(stages) > 1 else {}

    @property
    def world_size(self) -> int:
        """Return the largest that a rank names."""
        return max((reading.world_size for reading in (*(one.now for one in self.ranks), *self.ended)), default=0)

    @cached_property
    def seconds(self) -> float:
        """The window."""
        return fmean(one.seconds for one in self.ranks) if self.ranks else 0.0

    @cached_property
    def steps(self) -> float:
        """Steps in the window: of the rank that made the most."""
        return max((one.spent.steps for one in self.ranks), default=0.0)

    @property
    def steps_rate(self) -> float:
        """Return the steps per second."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def stalled(self) -> float:
        """Return for how many seconds no rank has made progress."""
        return min((one.stalled for one in self.ranks), default=0.0)

    @property
    def max_lag(self) -> float:
        """Return the largest lag; 0 if no rank has one."""
        return max((one.lag for one in self.ranks if one.lag is not None), default=0.0)

    @property
    def speaker(self) -> RankFacts | None:
        """Return the rank that speaks for the run in what all ranks do alike: the first."""
        return self.ranks[0] if self.ranks else None

    def middle(self, value: Callable[[RankFacts], float | None]) -> float | None:
        """Return the median over the ranks of which the value is known. See `lower_median`."""
        known = [found for one in self.ranks if (found := value(one)) is not None]
        return lower_median(known) if known else None


def lower_median(values: Sequence[float]) -> float:
    """Return what at least half of the values reach; of three or fewer the least, so that it holds for each of them."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) > 3 else ordered[0]


def compare(run: Run, then: Mapping[int, RankReading], now: Mapping[int, RankReading]) -> RunFacts:
    """Return the facts of the window between two readings of each rank. A rank without a former one is not in it."""
    living = [
        facts
        for number, reading in sorted(now.items())
        if reading.ended is None and (facts := _rank_facts(then.get(number), reading))
    ]
    judged = [facts for members in _by_peers(living).values() for facts in _judge(members)]
    ended = tuple(reading for _, reading in sorted(now.items()) if reading.ended)
    return RunFacts(run, tuple(sorted(judged, key=lambda facts: facts.rank)), ended)


def _rank_facts(then: RankReading | None, now: RankReading) -> RankFacts | None:
    if then is None:
        return None
    base = then.counters if then.began == now.began else Counters()
    counted = spent(now.counters, base)
    seconds = sum(counted.phases.values())
    return RankFacts(now, seconds, counted) if seconds > 0.0 else None


def _by_peers(ranks: Sequence[RankFacts]) -> Mapping[Peers, Sequence[RankFacts]]:
    peers: dict[Peers, list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        peers[facts.peers].append(facts)
    return peers


def _judge(members: Sequence[RankFacts]) -> Sequence[RankFacts]:
    """Decide on the clock of a group, and how far each of its ranks lags."""
    clock = DEVICE if all(one.spent.device_steps > 0 for one in members) else HOST
    members = [replace(one, clock=clock) for one in members]
    waits = [one.wait for one in members]
    if len(members) < 2 or not _is_comparable(members):
        return members
    # The median of two values lies halfway between them and would halve the lag.
    reference = median(waits) if len(waits) > 2 else max(waits)
    return [replace(one, lag=reference - wait) for one, wait in zip(members, waits, strict=True)]


def _is_comparable(members: Sequence[RankFacts]) -> bool:
    """Whether what they waited is for each other and not for a rank in a planned phase."""
    if all(one.spent.aligned.seconds > 0.0 for one in members):
        return True
    return all(one.spent.steps > 0 and not one.planned_ratio for one in members)


def _unplanned(seconds: Mapping[str, float]) -> Mapping[str, float]:
    return {phase: value for phase, value in seconds.items() if phase not in phases.PLANNED}
