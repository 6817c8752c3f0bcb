"""Facts: what the ranks of a run did over a window, and how they compare.

In synchronous training all ranks have the same step time. The late ranks are those that wait least in collectives,
since the others wait for them. A rank's lag is the mean wait of those others less its own wait, as a ratio of the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from rankscope.record import phases
from rankscope_exporter.diagnosis.late_set import late_sets
from rankscope_exporter.diagnosis.readings import Counters, RankReading, Run, spent

Peers = tuple[str, int | None]
"""A group and a pipeline stage. Ranks with the same group and stage do the same work and are compared."""
WAIT = "collective_wait"
HOST, DEVICE = "host", "device"
RARELY, WHOLE = 0.5, 0.8
"""Ratio of a run's time that is compared, up to which stalls are added to it, and ratio of a stall from which on it was
compared."""


class Stall(NamedTuple):
    """A standstill that has ended: these ranks were in a phase, and the others waited for them."""

    ends: float
    seconds: float
    ranks: tuple[int, ...]
    phase: str


@dataclass(frozen=True)
class RankFacts:
    """One living rank over a window. Ratios are relative to the window unless the name says otherwise."""

    now: RankReading
    seconds: float
    """The training thread's seconds in the window."""
    spent: Counters
    """The increase of the rank's counters in the window."""
    clock: str = HOST
    """The clock that measures its group: `device` if all ranks of the group have steps measured on it, else `host`."""
    lag: float | None = None
    """The time that the peers who are not late would save if it were like them, as a ratio of the step. None without
    peers."""

    @property
    def rank(self) -> int:
        """Return the rank's number."""
        return self.now.rank

    @property
    def peers(self) -> Peers:
        """Return the key of the ranks that do the same work."""
        return self.now.group, self.now.stage

    @cached_property
    def host_ratios(self) -> Mapping[str, float]:
        """The training thread's time by phase."""
        return {phase: seconds / self.seconds for phase, seconds in self.spent.phases.items()}

    @cached_property
    def device_scale(self) -> float:
        """The ratio of the window for each second measured on the device. 0 if the group is measured on the host."""
        measured = sum(unplanned(self.spent.device_phases).values())
        return sum(unplanned(self.host_ratios).values()) / measured if self.clock == DEVICE and measured else 0.0

    @cached_property
    def ratios(self) -> Mapping[str, float]:
        """Time by phase, measured by `clock`. Planned phases are always measured on the host."""
        if not self.device_scale:
            return self.host_ratios
        planned = {phase: ratio for phase, ratio in self.host_ratios.items() if phase in phases.PLANNED}
        measured = unplanned(self.spent.device_phases)
        return planned | {phase: seconds * self.device_scale for phase, seconds in measured.items()}

    @cached_property
    def step_ratios(self) -> Mapping[str, float]:
        """Time by phase in steps without a planned phase; in the compared steps, if there are any."""
        ratios = unplanned(self.ratios)
        total = sum(ratios.values())
        of_all = {phase: ratio / total for phase, ratio in ratios.items()} if total else {}
        aligned = self.spent.aligned
        if aligned.seconds <= 0.0:
            return of_all
        # The step rings do not have phases that the script defines itself.
        own = {phase: ratio for phase, ratio in of_all.items() if phase not in phases.NAMES}
        return own | {phase: seconds / aligned.seconds for phase, seconds in aligned.phases.items()}

    @property
    def wait(self) -> float:
        """Return the rank's wait in collectives, as a ratio of its steps."""
        aligned = self.spent.aligned
        if aligned.seconds > 0.0:
            return (aligned.wait_floor + aligned.skew) / aligned.seconds
        return self.step_ratios.get(WAIT, 0.0)

    @cached_property
    def planned_seconds(self) -> float:
        """Return the rank's seconds in planned phases."""
        return sum(self.spent.phases.get(phase, 0.0) for phase in phases.PLANNED)

    @property
    def planned_ratio(self) -> float:
        """Return the rank's time in planned phases."""
        return self.planned_seconds / self.seconds

    @cached_property
    def unplanned_seconds(self) -> float:
        """Return the rank's seconds outside of planned phases."""
        return sum(unplanned(self.spent.phases).values())

    @property
    def stalled(self) -> float:
        """Return the seconds since the rank last made progress."""
        return self.now.at - self.now.last_progress

    def rate(self, counted: float | None) -> float | None:
        """Return a counter's increase per second."""
        return None if counted is None else counted / self.seconds


@dataclass(frozen=True)
class RunFacts:
    """The ranks of one run over a window."""

    run: Run
    ranks: tuple[RankFacts, ...]
    """The living ranks, by number."""
    ended: tuple[RankReading, ...] = ()

    @cached_property
    def peers(self) -> Mapping[Peers, Sequence[RankFacts]]:
        """The living ranks by the peers that they are compared with."""
        return _by_peers(self.ranks)

    def peers_of(self, rank: int | None) -> Sequence[RankFacts]:
        """Return a living rank's peers, with itself. Raise StopIteration if there is no such rank."""
        return next(members for members in self.peers.values() if rank in {one.rank for one in members})

    @cached_property
    def skews(self) -> Mapping[int, float]:
        """Each compared rank's wait for later ones of its peers, as a ratio of the step."""
        skews: dict[int, float] = {}
        for members in self.peers.values():
            compared = [one for one in members if one.lag is not None]
            least = min((one.wait for one in compared), default=0.0)
            for one in compared:
                aligned = one.spent.aligned
                skews[one.rank] = aligned.skew / aligned.seconds if aligned.seconds > 0.0 else one.wait - least
        return skews

    @cached_property
    def ranks_by_gpu(self) -> Mapping[str, int]:
        """The number of living ranks by the UUID of their GPU."""
        return Counter(one.now.uuid for one in self.ranks)

    def foreign_processes(self, one: RankFacts) -> int:
        """Return the number of processes on a rank's GPU that are not ranks; 0 if it is unknown."""
        if not one.now.uuid or one.now.gpu is None or one.now.gpu.processes is None:
            return 0
        return max(one.now.gpu.processes - self.ranks_by_gpu[one.now.uuid], 0)

    @cached_property
    def stages(self) -> Mapping[int, Sequence[RankFacts]]:
        """The living ranks by pipeline stage. Empty without a pipeline."""
        stages: dict[int, list[RankFacts]] = defaultdict(list)
        for one in self.ranks:
            if one.now.stage is not None:
                stages[one.now.stage].append(one)
        return stages if len(stages) > 1 else {}

    @property
    def is_interactive(self) -> bool:
        """Return whether the run is a single process outside of all named phases."""
        return len(self.ranks) == 1 and self.ranks[0].now.phase == "other"

    @property
    def world_size(self) -> int:
        """Return the largest world size of any rank."""
        return max((reading.world_size for reading in (*(one.now for one in self.ranks), *self.ended)), default=0)

    @cached_property
    def seconds(self) -> float:
        """The window's length: the mean over the ranks."""
        return fmean(one.seconds for one in self.ranks) if self.ranks else 0.0

    @cached_property
    def steps(self) -> float:
        """The number of steps in the window, with skipped ones: the largest of any rank."""
        return max((one.spent.iterations for one in self.ranks), default=0.0)

    @cached_property
    def device_steps(self) -> float:
        """The number of steps on the device, at most `steps`, or if there are none: the host may issue them in bursts.

        Where steps were compared on the device, they show the others' length.
        """
        aligned = [one.spent.aligned for one in self.ranks if one.clock == DEVICE and one.spent.aligned.steps]
        if not aligned or len(aligned) < len(self.ranks):
            return self.steps
        seconds = min(one.unplanned_seconds for one in self.ranks)
        steps = seconds / fmean(one.seconds / one.steps for one in aligned)
        return min(steps, self.steps) if self.steps else steps

    @property
    def steps_rate(self) -> float:
        """Return the run's steps per second."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def bytes_rate(self) -> float:
        """Return the bytes per second that a rank moves in collectives."""
        return fmean(sum(one.spent.collectives.bytes.values()) / one.seconds for one in self.ranks)

    @property
    def stalled(self) -> float:
        """Return the seconds since any rank made progress."""
        return min((one.stalled for one in self.ranks), default=0.0)

    @property
    def max_lag(self) -> float:
        """Return the largest lag; 0 if no rank has one."""
        return max((one.lag for one in self.ranks if one.lag is not None), default=0.0)

    @property
    def first(self) -> RankFacts | None:
        """Return the first rank. It represents the run in what all ranks do in the same way."""
        return self.ranks[0] if self.ranks else None

    def lower_median(self, value: Callable[[RankFacts], float | None]) -> float | None:
        """Return the lower median of a value over the ranks for which it is known; None if it is for no rank."""
        known = [found for one in self.ranks if (found := value(one)) is not None]
        return lower_median(known) if known else None


def lower_median(values: Sequence[float]) -> float:
    """Return the lower of the two middle values, or the middle one; the least of three or fewer values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) > 3 else ordered[0]


def compare(
    run: Run, then: Mapping[int, RankReading], now: Mapping[int, RankReading], stalls: Iterable[Stall] = ()
) -> RunFacts:
    """Return the facts of the window between two readings of each rank, without ranks that have no earlier reading."""
    living = [
        facts
        for number, reading in sorted(now.items())
        if reading.ended is None and (facts := _rank_facts(then.get(number), reading))
    ]
    for stall in stalls:
        first = next((one for one in living if one.rank in stall.ranks), None)
        if first and then[first.rank].at < stall.ends <= first.now.at:
            others = [one for one in living if one.peers != first.peers]
            living = [*others, *_with_stall(_by_peers(living)[first.peers], first, stall)]
    compared = [facts for members in _by_peers(living).values() for facts in _compare_peers(members)]
    ended = tuple(reading for _, reading in sorted(now.items()) if reading.ended)
    return RunFacts(run, tuple(sorted(compared, key=lambda facts: facts.rank)), ended)


def _rank_facts(then: RankReading | None, now: RankReading) -> RankFacts | None:
    if then is None:
        return None
    base = then.counters if then.began == now.began else Counters()
    counted = spent(now.counters, base)
    seconds = sum(counted.phases.values())
    return RankFacts(now, seconds, counted) if seconds > 0.0 else None


def _with_stall(members: Sequence[RankFacts], late: RankFacts, stall: Stall) -> Sequence[RankFacts]:
    """Return peers with a stall in their compared steps, as far as no planned phase of the late rank was the reason.

    If nothing else of the window was compared, the rest of it is there as well: it has no stall.
    """
    planned = late.planned_seconds - min(one.planned_seconds for one in members)
    seconds = min(stall.seconds - planned, late.seconds)
    if seconds <= 0.0 or not (weight := _weight(late, stall.phase, seconds)):
        return members
    of_all = weight if late.spent.aligned.seconds else weight * max(late.unplanned_seconds / seconds, 1.0)
    return [_stalled(one, stall, weight, of_all) for one in members]


def _weight(late: RankFacts, phase: str, seconds: float) -> float:
    """Return the seconds of a stall to add to the compared steps, so that it counts as much as the other time.

    The device measures few steps, and a stall is in a single one: mostly none of it is compared, at times all of it.
    """
    counted = late.now.counters
    whole = sum(unplanned(counted.phases).values())
    ratio = counted.aligned.seconds / whole if counted.device_steps and whole else 0.0
    if not 0.0 < ratio < RARELY:
        return 0.0
    compared = min(late.spent.aligned.phases.get(phase, 0.0), seconds)
    return ratio * seconds if compared <= WHOLE * seconds else (ratio - 1.0) * compared


def _stalled(one: RankFacts, stall: Stall, weight: float, of_all: float) -> RankFacts:
    """Return a rank's facts with a stall of this weight in its compared steps, and the time with it."""
    aligned, is_late = one.spent.aligned, one.rank in stall.ranks
    phase, skew = (stall.phase, 0.0) if is_late else (WAIT, weight)
    blamed = {phase: weight / len(stall.ranks)} if is_late else {}
    aligned = replace(
        aligned,
        seconds=aligned.seconds + of_all,
        skew=max(aligned.skew + skew, 0.0),
        blame=_added(aligned.blame, blamed),
        phases=_added(aligned.phases, {phase: weight}),
    )
    return replace(one, spent=replace(one.spent, aligned=aligned))


def _added(seconds: Mapping[str, float], more: Mapping[str, float]) -> Mapping[str, float]:
    return {**seconds, **{name: seconds.get(name, 0.0) + value for name, value in more.items()}}


def _by_peers(ranks: Sequence[RankFacts]) -> Mapping[Peers, Sequence[RankFacts]]:
    peers: dict[Peers, list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        peers[facts.peers].append(facts)
    return peers


def _compare_peers(members: Sequence[RankFacts]) -> Sequence[RankFacts]:
    """Return the ranks with their group's clock and each rank's lag."""
    clock = DEVICE if all(one.spent.device_steps > 0 for one in members) else HOST
    members = [RankFacts(one.now, one.seconds, one.spent, clock) for one in members]
    if len(members) < 2 or not _is_comparable(members):
        return members
    waits = {one.rank: one.wait for one in members}
    late = next(late_sets(waits, 0.0, 0.0), ())
    others = fmean(wait for rank, wait in waits.items() if rank not in late)
    return [RankFacts(one.now, one.seconds, one.spent, clock, others - one.wait) for one in members]


def _is_comparable(members: Sequence[RankFacts]) -> bool:
    """Return whether the ranks waited for each other, and not for a rank in a planned phase."""
    if all(one.spent.aligned.seconds > 0.0 for one in members):
        return True
    if any(one.now.counters.device_steps > 0 and one.now.counters.aligned.steps > 0 for one in members):
        return False  # between compared steps: the host does not wait in collectives
    return all(one.spent.steps > 0 and not one.planned_ratio for one in members)


def unplanned(seconds: Mapping[str, float]) -> Mapping[str, float]:
    """Return the time by phase without planned phases."""
    return {phase: value for phase, value in seconds.items() if phase not in phases.PLANNED}
