"""Standstills: no rank makes progress toward a step. What the run waits for, and for how long it has done so before.

Progress is a step, a backward pass, an issued collective, a checkpoint, or any event in a planned phase. A batch is
none, and a forward pass only while no rank waits for another one: a rank may fetch or generate without end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

from rankscope.record import phases
from rankscope_exporter.diagnosis.facts import WAIT, Stall
from rankscope_exporter.diagnosis.readings import RankReading, are_stopped
from rankscope_exporter.diagnosis.saved import Time
from rankscope_exporter.diagnosis.step_times import longest_step
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    blocking_ranks,
    collectives_behind,
    unfinished_group,
    waits,
    with_unused_groups,
)

INSIDE, FINISHED, STOPPED = "inside_collective", "finished", "stopped"
MISSING = "node_missing"
"""The others wait, or no rank does, and what the ranks of a node do is unknown: it does not answer."""
STARTUP, OTHER, OUTSIDE = "startup", "other", "outside"
"""What a run waits for: a rank that works outside of all phases, and all ranks if none waits for another one. That may
be a pause, as for rollouts by another process, and says nothing about ranks that wait for one of them."""
AWAITED = frozenset((*phases.NAMES, OUTSIDE, FINISHED, STOPPED)) - {STARTUP}
"""All that has a pace. A script's own phases count as `other`. No start-up predicts how long the next one takes."""
UNNAMED = (OUTSIDE, *phases.PLANNED)
"""What no single rank is blamed for: long waits for it are the pace of all ranks."""
PAUSES = frozenset((STARTUP, OTHER, *phases.PLANNED))
"""Phases that do not belong to the usual step."""
BLAMED = frozenset((*phases.COMPUTING, "data_wait", "h2d_copy", OTHER))
"""The phases of a rank that the others wait for, each in a single step."""
SILENT = 5.0
"""Seconds without an event after which a rank is stuck in its phase, or waits in its collective."""
MIN_PAUSE = 0.5
"""The same in planned phases, whose first standstills are the pace of all later ones."""
GOES_ON = 60.0  # longest time for which ranks go on after a rank that they wait for has finished
EVER, HOUR = 1.5, 3600.0
"""Multiple of the longest standstill of all after which a run hangs, and the time of the longest recent one."""
ROUNDING = 1e-3
PACES = STALLS = 64
"""The most paces and stalls of a run that are kept."""

Issued = Mapping[int, Mapping[str, float]]
"""The number of issued collectives by rank and group."""
Ranks = Sequence[RankReading]


class Standstill(NamedTuple):
    """A run without progress."""

    rank: RankReading
    """The rank that the others wait for."""
    cause: str
    """The phase that the rank is in, or INSIDE, FINISHED or STOPPED."""
    awaited: str
    """What the run waits for: one of AWAITED or `startup`."""
    seconds: float
    """How long the run has waited for that."""
    behind: Mapping[int, float]
    """The ranks that others wait for, and how many collectives each has issued less."""
    has_waiting: bool
    """True if another rank waits."""
    has_evidence: bool
    """True if the collectives, or being the only rank that does not wait, show which rank the others wait for."""
    missing: tuple[int, ...] = ()
    """The ranks of a node that does not answer, if it may be the reason."""


class Longest(NamedTuple):
    """The longest standstills of a run that ended: of all, and recently."""

    ever: float
    recent: float
    ended: Time
    """When the recent one ended."""


class Pace:
    """The standstills of one run."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.standstill: Standstill | None = None
        self.longest: dict[str, Longest] = {}
        """By what the run waited for, or by `key` if it waited so long that it was a hang, for the first rank."""
        self.stalls: deque[Stall] = deque(maxlen=STALLS)
        self.stepped_since: float | None = None
        self._steps, self._stepped_at = 0.0, -inf
        """The number of steps, and when it last changed."""
        self._recorded: float | None = None
        """The longest step before the first reading, if the run had then stepped for long enough."""
        self._waited: dict[tuple[str, int], float] = {}
        """Since the last progress: how long the run has waited for what, and for which rank."""
        self._then: dict[int, RankReading] = {}
        """By rank: the reading since which its phases are counted."""
        self._last: Ranks = ()
        self._moved_at = -inf
        self._stopped_at = -inf
        """The last time when all ranks were stopped: the time until then is no standstill of theirs."""

    def observe(self, at: float, living: Ranks, ended: Ranks) -> None:
        """Add the readings of one moment. A rank's start is no progress of the others."""
        going_on = _going_on(self._last, living)
        begun = {one.rank for one in living} - {one.rank for _, one in going_on}
        if not going_on:
            self._begin(living)
        moved = _moved(going_on, living) if going_on else begun
        if are_stopped(living):
            self._stopped_at = at
        steps = max(one.counters.iterations for one in living)
        if steps and steps != self._steps:
            self._stepped_at = at
            self.stepped_since = at if self.stepped_since is None else self.stepped_since
        self._steps = steps
        if moved:
            self._end(at, {one.phase for one in living if one.rank not in moved})
            self._moved_at = max(min(one.last_progress, at) for one in living if one.rank in moved)
            self._add_stall(self._moved_at)
        # While a rank is in a planned phase, others may end their step, or enter that phase: its standstill goes on.
        again = begun | {one.rank for one in living if moved and (one.rank in moved or not _is_planned(one))}
        self._then = {one.rank: one if one.rank in again else self._then[one.rank] for one in living}
        self._last = living
        self.standstill = self._find(at, living, ended)

    def _begin(self, living: Ranks) -> None:
        """Begin with processes that are all seen for the first time: no standstill of earlier ones was their pace."""
        self._waited.clear()
        began = max(one.began for one in living)
        if self.stepped_since is not None and self.stepped_since < began:
            self.stepped_since = None
        since = max(one.began + one.counters.phases.get(STARTUP, 0.0) for one in living)
        longest = max(longest_step(one.counters.step_buckets) for one in living)
        has_pace = max(one.last_progress for one in living) - since > self._thresholds.pace_known_after
        self._recorded = longest if has_pace and longest < inf else None

    def _end(self, at: float, standing: Collection[str]) -> None:
        """End the standstills of all but ranks that are still in planned phases."""
        going_on = {*standing} & {*phases.PLANNED}
        limits, least = self.limits(at), self.shortest_limit or inf
        for (awaited, rank), seconds in self._waited.items():
            if awaited not in going_on and self.stepped_since is not None:
                is_hang = awaited not in UNNAMED and seconds >= max(least, limits.get(awaited, 0.0))
                name = key(awaited, rank)
                of_others = any(one != name and one.startswith(f"{awaited} ") for one in self.longest)
                name = name if is_hang and not of_others else awaited
                known = self.longest.get(name, Longest(0.0, 0.0, at))
                is_longer = seconds >= known.recent or at - known.ended > HOUR
                recent = (seconds, at) if is_longer else (known.recent, known.ended)
                self.longest[name] = Longest(max(known.ever, seconds), *recent)
        while len(self.longest) > PACES:
            del self.longest[min(self.longest, key=lambda name: self.longest[name].ended)]
        self._waited = {one: seconds for one, seconds in self._waited.items() if one[0] in going_on}

    def _add_stall(self, at: float) -> None:
        found = self.standstill
        if found and found.has_evidence and found.cause in BLAMED:
            late = (found.rank, *(one for one in self._last if one.rank in found.behind and one.phase == found.cause))
            ranks = tuple(sorted({one.rank for one in late}))
            self.stalls.append(Stall(at, found.seconds + at - found.rank.at, ranks, found.cause))

    def limits(self, at: float) -> Mapping[str, float]:
        """Return the seconds after which the run hangs, by what it waits for, as far as its pace is known."""
        factor = self._thresholds.stuck_pace
        return {
            awaited: max(EVER * known.ever, factor * known.recent if at - known.ended < HOUR else 0.0)
            for awaited, known in self.longest.items()
        }

    @property
    def shortest_limit(self) -> float | None:
        """Return the seconds after which it hangs whatever it waits for; None too soon after the first steps."""
        floor = max(self._thresholds.stuck_floor, EVER * usual_step(self._last))
        if self.stepped_since is not None and self._stepped_at - self.stepped_since > self._thresholds.pace_known_after:
            return floor
        return None if self._recorded is None else max(floor, EVER * self._recorded)

    def _find(self, at: float, living: Ranks, ended: Ranks) -> Standstill | None:
        stands = at - max(self._moved_at, self._stopped_at)
        if stands < (MIN_PAUSE if any(map(_is_planned, living)) else SILENT):
            return None
        ended = _finished(living, ended)
        behind = ranks_behind(living, ended)
        one, cause = _choose_rank(living, ended, behind)
        free = [other for other in living if not _is_in_a_collective(other, living)]
        has_waiting = bool(behind) or any(_waits(other) for other in living if other.rank != one.rank)
        has_evidence = bool(behind) or (has_waiting and len(free) == 1)
        awaited = cause
        if cause not in (FINISHED, MISSING):
            phase, seconds = self._longest_phase(one)
            cause = cause if cause in (INSIDE, STOPPED) else phase
            awaited = cause if cause == STOPPED else _awaited(one, phase, has_waiting=has_waiting)
            seconds = min(seconds, at - self._stopped_at)
            if awaited in AWAITED:
                one_awaited = awaited, one.rank
                self._waited[one_awaited] = max(seconds, self._waited.get(one_awaited, 0.0))
            stands = min(stands, seconds)
        missing = tuple(sorted(other.rank for other in living if other.is_missing and other.node == one.node))
        missing = missing if cause == MISSING else ()
        return Standstill(one, cause, awaited, stands, behind, has_waiting, has_evidence, missing)

    def _longest_phase(self, one: RankReading) -> tuple[str, float]:
        """Return the phase that a rank is stuck in; of a rank with events, the one that took most of its time."""
        then = self._then[one.rank]
        before = {**then.counters.phases}
        before[then.phase] = before.get(then.phase, 0.0) - (then.at - then.last_progress)
        spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in one.counters.phases.items()}
        if _is_silent(one) or _is_planned(one) or not spent:
            return one.phase, max(spent.get(one.phase, 0.0), one.at - one.last_progress)
        phase = max(spent, key=spent.__getitem__)
        return phase, spent[phase]


def key(awaited: str, rank: int) -> str:
    """Return the name of the pace of what the run waits for while it waits for this rank."""
    return f"{awaited} {rank}"


def _awaited(one: RankReading, phase: str, *, has_waiting: bool) -> str:
    """Return what a run waits for if it waits for this rank."""
    is_known = phase in phases.NAMES and phase != OTHER
    if has_waiting or (is_known and (_is_silent(one) or phase in ("data_wait", *phases.PLANNED))):
        return phase if is_known else OTHER
    return OUTSIDE


def usual_step(living: Ranks) -> float:
    """Return the mean seconds of a step of the rank with the shortest ones, 0 before its first one.

    Pauses, planned phases, and the time since its last progress are not part of it.
    """
    return min(map(_usual_step, living), default=0.0)


def _usual_step(one: RankReading) -> float:
    spent = sum(seconds for phase, seconds in one.counters.phases.items() if phase not in PAUSES)
    spent -= 0.0 if one.phase in PAUSES else one.at - one.last_progress
    return max(spent, 0.0) / one.counters.iterations if one.counters.iterations else 0.0


def has_progress(before: Ranks, living: Ranks) -> bool:
    """Return whether a rank has made progress since its reading before."""
    return bool(_moved(_going_on(before, living), living))


def _going_on(before: Ranks, living: Ranks) -> Sequence[tuple[RankReading, RankReading]]:
    """Return the reading before and the one now of each rank whose process is still the same."""
    last = {one.rank: one for one in before}
    return [(last[one.rank], one) for one in living if one.rank in last and last[one.rank].began == one.began]


def _moved(going_on: Sequence[tuple[RankReading, RankReading]], living: Ranks) -> set[int]:
    waiting = any(map(_waits, living))
    return {now.rank for then, now in going_on if _has_moved(then, now, waiting)}


def _has_moved(then: RankReading, now: RankReading, waiting: bool) -> bool:
    """Return whether a rank has made progress, while another one waits or not."""
    before, after = then.counters, now.counters
    return (
        (after.iterations, after.micro_steps, now.checkpoints)
        != (before.iterations, before.micro_steps, then.checkpoints)
        or now.issued != then.issued
        or after.collectives.calls != before.collectives.calls
        or _is_planned(now) != _is_planned(then)
        or (_is_planned(now) and now.last_progress > then.last_progress)
        or (not waiting and _computed(now) > _computed(then) + ROUNDING)
    )


def _computed(one: RankReading) -> float:
    """Return the seconds of a rank's completed forward passes."""
    seconds = one.counters.phases.get("forward", 0.0)
    return seconds - (one.at - one.last_progress) if one.phase == "forward" else seconds


def _is_planned(one: RankReading) -> bool:
    return one.phase in phases.PLANNED


def _is_silent(one: RankReading) -> bool:
    return one.at - one.last_progress > SILENT


def _waits(one: RankReading) -> bool:
    """Return whether a rank has waited for others for a while."""
    return _is_silent(one) and (_is_in_collective_on_host(one) or (_waits_for_the_device(one) and one.phase != OTHER))


def ranks_behind(living: Ranks, ended: Ranks) -> Mapping[int, float]:
    """Return the ranks that the others finally wait for, and how many collectives each is behind in one group."""
    issued = with_unused_groups({one.rank: one.issued for one in (*ended, *living)})
    # A rank outside of collectives may have one in flight. It does not wait for it if other ranks wait for the rank.
    ranks = living, ended, issued
    late = _blocking_ranks(*ranks, _is_waiting) or _blocking_ranks(*ranks, lambda _: True)
    return {rank: count for rank in late if (count := collectives_behind(rank, issued)) > 0.0}


def _blocking_ranks(living: Ranks, ended: Ranks, issued: Issued, is_waiting: Callable[[RankReading], bool]) -> set[int]:
    positions = [
        Position(one.rank, issued[one.rank], waits_in=_operation(one, issued) if is_waiting(one) else None)
        for one in living
    ] + [Position(one.rank, issued[one.rank]) for one in ended]
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, counts in issued.items():
        for group in counts:
            groups[group].append(rank)
    return {rank for ranks in blocking_ranks(waits(positions, groups)) if len(ranks) == 1 for rank in ranks}


def _operation(one: RankReading, issued: Issued) -> Operation | None:
    """Return the collective that a rank is in. If that is unknown, choose one that another rank has not issued."""
    group = one.collective or unfinished_group(one.rank, issued) or ""
    count = one.issued.get(group)
    return None if count is None else Operation("", group, count)


def _is_waiting(one: RankReading) -> bool:
    return _is_in_collective_on_host(one) or _waits_for_the_device(one)


def _is_in_collective_on_host(one: RankReading) -> bool:
    """Return whether the host is in a collective. A planned phase, such as a start-up, hides it from the phases."""
    return one.phase == WAIT or bool(one.collective)


def _waits_for_the_device(one: RankReading) -> bool:
    return one.phase in ("device_wait", OTHER) and one.counters.device_steps > 0 and bool(one.issued)


def _is_in_a_collective(one: RankReading, living: Ranks) -> bool:
    return _is_in_collective_on_host(one) or (_waits_for_the_device(one) and len(living) > 1)


def _finished(living: Ranks, ended: Ranks) -> Ranks:
    """Return the ranks that the others may wait for because they have ended as they should.

    If the others went on for long after that, they do not wait for it: their group has become smaller, or the rank's
    process trains on without the hook. Collectives of a rank that has issued none are unknown.
    """
    ranks = {one.rank for one in living}
    progress = max((one.last_progress for one in living), default=inf)
    return [
        one
        for one in ended
        if one.ended and one.ended.reason == FINISHED and one.rank not in ranks and one.issued
        if progress - one.ended.at < GOES_ON
    ]


def _choose_rank(living: Ranks, ended: Ranks, behind: Mapping[int, float]) -> tuple[RankReading, str]:
    for one in ended:
        if one.rank in behind:
            return one, FINISHED
    missing = [one for one in living if one.is_missing]
    living = [one for one in living if not one.is_missing]
    late = [one for one in living if one.rank in behind]
    if missing and not late:
        return max(missing, key=lambda one: bool(one.node)), MISSING
    stopped = [one for one in late or living if one.is_stopped]
    candidates = stopped or late or [one for one in living if not _is_in_a_collective(one, living)]
    if candidates:
        one = max(candidates, key=lambda one: one.at - one.last_progress)
        return one, STOPPED if stopped else one.phase
    return max(living, key=lambda one: one.at - one.last_progress), INSIDE
