"""Extrapolation of the steps that are measured on the device to all steps of a run, for its account of GPU time.

Which steps are measured is decided by their numbers, so long steps are measured no more often than short ones, and a
window of seconds may consist of one long step that is not. The host knows the number and the sum of all steps. So

    seconds of all steps = steps * length of a usual step + excess

and the excess has the composition of the excess of the long steps that were measured. This is a regression estimator
(Cochran, Sampling Techniques, chapter 7). It needs only the sum of the steps' lengths on the host: a host that runs
ahead issues many steps in a burst, and then waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from rankscope.record.phases import PLANNED
from rankscope_exporter.diagnosis.facts import DEVICE, WAIT, RankFacts, RunFacts, unplanned
from rankscope_exporter.diagnosis.readings import NUMBER_BYTES, Counters, RankReading

USUAL, EXCESS, UNKNOWN = "usual", "excess", "unknown"
RECENT, FEWEST = 16, 3
"""The number of newest readings with measured steps that show a usual step, and the fewest that do."""
LONG = 1.25
"""Multiple of the median step from which a step is long. Healthy steps of one kind differ by a few percent."""
KEPT = 1.0 - 1.0 / 64
"""What each long step leaves of the weight of the earlier ones."""
LEAD_SECONDS = 30.0
"""The longest time by which the host's steps are ahead of the device's."""
AWAITED_SECONDS = 900.0
"""Seconds of a rank's steps, and of the diagnosis, after which a measured step is no longer awaited."""
UNKNOWN_AFTER = 3600.0
"""Seconds after which time is unknown that no measured step explains."""
LEAST = 1e-6
"""The least ratio of a window's time, if all of it is left for later."""
SMALL, EDGE = 0.05, 1.5
"""An excess up to this ratio of the time, or this number of steps, is none: a window begins and ends within steps."""

Parts = Mapping[str, float]


class _Steps:
    """Measured steps of one rank: what a usual step consists of, and what long ones have in addition."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, Parts]] = deque(maxlen=RECENT)
        """Steps, seconds and parts, by reading."""
        self._usual: Sequence[tuple[float, float, Parts]] = ()
        self._usual_parts: Parts = {}
        """What a usual step consists of."""
        self.length = 0.0
        """The seconds of a usual step."""
        self._excess = self._squares = 0.0
        self._of_excess: Parts = {}

    def __len__(self) -> int:
        return len(self._recent)

    def kept_bytes(self) -> int:
        """Return about how much memory it takes."""
        return NUMBER_BYTES * sum(4 + len(parts) for _, _, parts in self._recent)

    def add(self, steps: float, seconds: float, parts: Parts) -> None:
        """Add the measured steps of one reading."""
        self._recent.append((steps, seconds, parts))
        limit = LONG * median(seconds / steps for steps, seconds, _ in self._recent)
        self._usual = [one for one in self._recent if one[1] <= limit * one[0]]
        number = sum(steps for steps, _, _ in self._usual)
        self.length = sum(seconds for _, seconds, _ in self._usual) / number
        self._usual_parts = _sum((1.0 / number, parts) for _, _, parts in self._usual)
        if seconds > limit * steps:
            excess = seconds - steps * self.length
            self._excess = KEPT * self._excess + excess
            self._squares = KEPT * self._squares + excess**2
            self._of_excess = _sum([(KEPT, self._of_excess), (1.0, parts), (-steps, self._usual_parts)])

    @property
    def long(self) -> float:
        """The excess of a long step that was measured, weighted by itself; 0 without one."""
        return self._squares / self._excess if self._excess else 0.0

    def parts(self, usual: float, excess: float) -> Parts:
        """Return what so many seconds of usual steps, and of the excess of long ones, consist of."""
        scale = excess / self._excess if self._excess else 0.0
        found = _sum([(usual / self.length, self._usual_parts), (scale, self._of_excess)])
        return {name: max(seconds, 0.0) for name, seconds in found.items()}


@dataclass
class _Rank:
    began: float
    measured: _Steps = field(default_factory=_Steps)
    compared: _Steps = field(default_factory=_Steps)
    """Steps that were compared with those of its peers: some of the measured ones, maybe read later."""
    balance: float = 0.0
    """Seconds that are not accounted for yet; negative if the host's steps are ahead of the device's."""
    planned: float = 0.0
    """Seconds of all ranks in planned phases at the last measured step: a step with such a phase is not usual."""


class _Time(NamedTuple):
    """The time of one rank in a window, in seconds."""

    usual: float
    for_planned: float
    """The wait for a rank that is in planned phases for longer."""
    excess: float = 0.0
    """The time of long steps beyond that of usual ones."""
    unknown: float = 0.0

    def plus(self, seconds: float, kind: str) -> _Time:
        """Return the time with more seconds of a kind: USUAL, EXCESS or UNKNOWN."""
        return self._replace(**{kind: getattr(self, kind) + seconds})


class MeasuredSteps:
    """The measured steps of a run."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._began = inf
        """The time of the first readings."""
        self._seconds = self._steps = 0.0
        """The time and the steps since all was accounted for."""

    @property
    def undecided(self) -> float:
        """The seconds of each rank that are left for later, because no measured step explains them yet."""
        return fmean(max(one.balance, 0.0) for one in self._ranks.values()) if self._ranks else 0.0

    def observe(self, then: Mapping[int, RankReading], now: Mapping[int, RankReading]) -> None:
        """Add the steps that were measured between two readings of the ranks."""
        self._began = min([self._began, *(one.at for one in now.values())])
        self._ranks = {number: rank for number, rank in self._ranks.items() if number in now and not now[number].ended}
        planned = sum(one.counters.phases.get(phase, 0.0) for one in now.values() for phase in PLANNED)
        for number, reading in now.items():
            before = then.get(number)
            is_measured = reading.counters.device_steps > 0.0 and before is not None and before.began == reading.began
            if before is None or not (is_measured and _has_new_steps(before.counters, reading.counters)):
                continue
            rank = self._ranks.get(number)
            if rank is None or rank.began != reading.began:
                rank = self._ranks[number] = _Rank(reading.began)
            if planned <= rank.planned:
                _add(rank, before.counters, reading.counters)
            rank.planned = planned

    def kept_bytes(self) -> int:
        """Return about how much memory it takes."""
        return sum(one.measured.kept_bytes() + one.compared.kept_bytes() for one in self._ranks.values())

    def is_awaited(self, run: RunFacts) -> bool:
        """Return whether the devices are in use, and no usual step of theirs is known yet."""
        return any(
            not self._is_known(one)
            and bool(one.now.counters.device_steps or one.now.counters.phases.get("device_wait"))
            and min(sum(unplanned(one.now.counters.phases).values()), one.now.at - self._began) < AWAITED_SECONDS
            for one in run.ranks
        )

    def account(self, run: RunFacts) -> tuple[RunFacts, float]:
        """Return the facts of the next window and the seconds of each rank that they account for.

        These are without the time that is left for later, and with such time before the window.
        """
        if not (known := self._known(run)):
            return run, run.seconds
        times, planned = {}, max(one.planned_seconds for one in run.ranks)
        for one in known:
            rank, (excess, for_planned) = self._ranks[one.rank], self._excess(one, planned)
            before, rank.balance = rank.balance, max(rank.balance + excess, -LEAD_SECONDS)
            usual = one.unplanned_seconds - for_planned + max(before, 0.0) - max(rank.balance, 0.0)
            times[one.rank] = _Time(usual, for_planned)
        self._seconds += fmean(one.unplanned_seconds for one in known)
        self._steps += fmean(one.spent.iterations for one in known)
        left = {rank: max(self._ranks[rank].balance, 0.0) for rank in times}
        kind = self._kind(left, self._steps, self._seconds)
        # Within a step, how long it takes is unknown.
        if (self._steps and kind != UNKNOWN) or self._seconds > UNKNOWN_AFTER:
            times = {rank: time.plus(left[rank], kind) for rank, time in times.items()}
            for number, over in left.items():
                self._ranks[number].balance -= over
            self._seconds = self._steps = 0.0
        seconds = fmean(
            one.planned_seconds + sum(times[one.rank]) if one.rank in times else one.seconds for one in run.ranks
        )
        return self._filled(run, times), seconds

    def show(self, run: RunFacts) -> RunFacts:
        """Return the facts of a window, with what is known of its steps that were not measured."""
        if not (known := self._known(run)):
            return run
        planned = max(one.planned_seconds for one in run.ranks)
        excesses = {one.rank: self._excess(one, planned) for one in known}
        over = {rank: max(excess, 0.0) for rank, (excess, _) in excesses.items()}
        kind = self._kind(
            over, fmean(one.spent.iterations for one in known), fmean(one.unplanned_seconds for one in known)
        )
        if kind != EXCESS and all(one.spent.device_steps for one in known):
            return run
        times = {}
        for one in known:
            for_planned, seconds = excesses[one.rank][1], over[one.rank]
            times[one.rank] = _Time(one.unplanned_seconds - for_planned - seconds, for_planned).plus(seconds, kind)
        return self._filled(run, times)

    def _is_known(self, one: RankFacts) -> bool:
        rank = self._ranks.get(one.rank)
        return rank is not None and rank.began == one.now.began and len(rank.measured) >= FEWEST

    def _known(self, run: RunFacts) -> Sequence[RankFacts]:
        """Return the ranks of the groups in which a usual step of each rank is known."""
        groups = [members for members in run.peers.values() if all(map(self._is_known, members))]
        return [one for members in groups for one in members if one.unplanned_seconds > 0.0]

    def _excess(self, one: RankFacts, planned: float) -> tuple[float, float]:
        """Return how much longer a rank's steps took than usual ones, and its wait for planned phases of others.

        `planned` are the seconds of the rank that is in planned phases longest.
        """
        excess = one.unplanned_seconds - one.spent.iterations * self._ranks[one.rank].measured.length
        for_planned = min(max(excess, 0.0), planned - one.planned_seconds)
        return excess - for_planned, for_planned

    def _kind(self, over: Mapping[int, float], steps: float, seconds: float) -> str:
        """Return the kind of time that the ranks' steps took longer than usual ones, in so many steps and seconds.

        It is known if the long steps that were measured are long enough, and usual if it is small.
        """
        excess, ranks = fmean(over.values()), [self._ranks[rank].measured for rank in over]
        if 0.0 < excess <= LONG * fmean(rank.long for rank in ranks) * max(steps, 1.0):
            return EXCESS
        edge = EDGE * fmean(rank.length for rank in ranks)
        return USUAL if excess <= max(SMALL * seconds, edge) else UNKNOWN

    def _filled(self, run: RunFacts, times: Mapping[int, _Time]) -> RunFacts:
        ranks = self._ranks
        filled = [_filled(one, ranks[one.rank], times[one.rank]) if one.rank in times else one for one in run.ranks]
        return replace(run, ranks=tuple(filled))


def _has_new_steps(then: Counters, now: Counters) -> bool:
    return now.device_steps > then.device_steps or now.aligned.steps > then.aligned.steps


def _add(rank: _Rank, then: Counters, now: Counters) -> None:
    phases = _sum([(1.0, unplanned(now.device_phases)), (-1.0, unplanned(then.device_phases))])
    steps, seconds = now.device_steps - then.device_steps, sum(phases.values())
    if steps > 0.0 and seconds > 0.0:
        dry = _sum([(1.0, now.device_dry), (-1.0, then.device_dry)])
        rank.measured.add(steps, seconds, phases | {f"dry {phase}": one for phase, one in dry.items()})
    steps, seconds = now.aligned.steps - then.aligned.steps, now.aligned.seconds - then.aligned.seconds
    if steps > 0.0 and seconds > 0.0:
        floor, skew = now.aligned.wait_floor - then.aligned.wait_floor, now.aligned.skew - then.aligned.skew
        rank.compared.add(steps, seconds, {"floor": floor, "skew": skew})


def _filled(one: RankFacts, rank: _Rank, time: _Time) -> RankFacts:
    """Return the facts of a rank as if all its steps were measured, and it had spent its time like this."""
    counted = one.spent
    parts = rank.measured.parts(time.usual, time.excess)
    device = {name: seconds for name, seconds in parts.items() if not name.startswith("dry ")}
    device[WAIT] = device.get(WAIT, 0.0) + time.for_planned
    dry = {name.removeprefix("dry "): seconds for name, seconds in parts.items() if name.startswith("dry ")}
    aligned = counted.aligned
    if len(rank.compared):
        waits = rank.compared.parts(time.usual, time.excess)
        aligned = replace(aligned, seconds=time.usual + time.excess, wait_floor=waits["floor"], skew=waits["skew"])
    scale = max(sum(time) / one.unplanned_seconds, LEAST)
    host = {phase: seconds * (1.0 if phase in PLANNED else scale) for phase, seconds in counted.phases.items()}
    whole = sum(host.values())
    host = {phase: seconds * one.seconds / whole for phase, seconds in host.items()}  # rates are those of the window
    filled = replace(
        counted, phases=host, device_phases={**device, UNKNOWN: time.unknown}, device_dry=dry, aligned=aligned
    )
    return replace(one, spent=filled, clock=DEVICE)


def _sum(scaled: Iterable[tuple[float, Parts]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for scale, parts in scaled:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + scale * value
    return total
