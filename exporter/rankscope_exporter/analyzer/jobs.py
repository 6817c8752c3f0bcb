"""The jobs that share a run's name: each is a run of its own, whole, with a name that stays.

Two Slurm jobs or two namespaces are two jobs. Two rendezvous addresses alone are not: the master's node may have
`localhost` and the others its address, and an elastic restart takes another port. They are two jobs if processes of
both are the same rank at the same time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from rankscope_exporter.analyzer.alignment import Process
from rankscope_exporter.analyzer.nodes import Found, Identity
from rankscope_exporter.diagnosis.readings import Run

OVERLAP = 10.0
"""Seconds for which two processes are one rank before they are two jobs: as long as a node's last moment counts, in
which a process that an elastic restart has replaced still lives."""
SETTLED = 15.0
"""Seconds after which a process keeps its run: the nodes do not answer all at once when the analyzer starts."""
REMEMBERED_FOR, PAST_LIMIT = 900.0, 256
"""Seconds for which the name of a job without processes is remembered, and a saved one after the start; and the most of
the former."""
JOBS_LIMIT = 8
"""The most jobs of one name and owner. The processes of others are left out."""

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """A rank as one target has sent it."""

    found: Found
    target: str
    node: str
    is_silent: bool

    @property
    def rank(self) -> int:
        """Return its number."""
        return self.found.reading.rank

    @property
    def is_living(self) -> bool:
        """Return whether its process lives, as far as its node answers."""
        return self.found.reading.ended is None and not self.is_silent

    @property
    def is_missing(self) -> bool:
        """Return whether its process lived when its node last answered."""
        return self.found.reading.ended is None and self.is_silent

    @property
    def last_active(self) -> float:
        """Return the last time at which its process is known to have lived."""
        reading = self.found.reading
        return reading.at if reading.ended is None else min(reading.ended.at, reading.last_progress)


@dataclass
class _Unit:
    """Processes that certainly are of one job: all that is known of them is equal."""

    identity: Identity
    records: list[Record]

    @property
    def is_living(self) -> bool:
        return any(one.is_living for one in self.records)

    @property
    def boots(self) -> frozenset[str]:
        return frozenset(one.found.process.boot for one in self.records)

    @property
    def began(self) -> float:
        return min(one.found.reading.began for one in self.records)


class _Past(NamedTuple):
    """A job as it was last seen, under another name than the one that its processes give."""

    given: Run
    identities: tuple[Identity, ...]
    boots: frozenset[str]
    at: float


@dataclass
class _Job:
    """A job, and the run's name that it has; None before it gets one."""

    run: Run | None = None
    units: list[_Unit] = field(default_factory=list)
    past: _Past | None = None
    """Set if it has no processes now. Only processes on one of its nodes may be its next ones."""

    @property
    def is_living(self) -> bool:
        return any(unit.is_living for unit in self.units)

    @property
    def records(self) -> Iterator[Record]:
        return (one for unit in self.units for one in unit.records)

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Return the identities of its living processes; if there are none, of all."""
        if self.past and not self.units:
            return self.past.identities
        return tuple(unit.identity for unit in [unit for unit in self.units if unit.is_living] or self.units)

    @property
    def boots(self) -> frozenset[str]:
        if self.past and not self.units:
            return self.past.boots
        return frozenset(one.found.process.boot for one in self.records)

    def values(self, name: str) -> set[str]:
        """Return the known values of a field of its identities."""
        return {value for identity in self.identities if (value := getattr(identity, name))}

    def contradicts(self, unit: _Unit) -> bool:
        """Return whether the unit certainly is of another job."""
        if self.past and not self.units and self.boots.isdisjoint(unit.boots):
            return True
        known = ((self.values(name), getattr(unit.identity, name)) for name in ("slurm_job", "namespace"))
        return any(value and values - {value} for values, value in known)

    def likeness(self, unit: _Unit) -> tuple[bool, bool, bool, float]:
        """Return how probable it is that the unit is of this job: equal nodes, ports and world sizes, near starts."""
        sizes = {one.found.reading.world_size for one in self.records}
        return (
            not self.boots.isdisjoint(unit.boots),
            any(identity.port == unit.identity.port for identity in self.identities),
            unit.records[0].found.reading.world_size in sizes,
            -min((abs(one.began - unit.began) for one in self.units), default=inf),
        )


class Jobs:
    """The names of all jobs."""

    def __init__(self) -> None:
        self._names: dict[Process, tuple[Run, float]] = {}
        """The run of each process, and since when."""
        self._identities: dict[Process, Identity] = {}
        self._restored: dict[tuple[Run, Identity], Run] = {}
        self._restored_until = inf
        self._past: dict[Run, _Past] = {}
        self._logged: set[Run] = set()

    def state(self) -> Iterator[tuple[Run, list[Sequence[str]]]]:
        """Yield each run's name, the name that its processes have given it, and their identities, as JSON values."""
        found: dict[Run, dict[tuple[Run, Identity], None]] = defaultdict(dict)
        for process, (run, _) in self._names.items():
            found[run][process.run, self._identities[process]] = None
        for run, known in found.items():
            yield run, [[*identity, *given] for given, identity in known]

    def restore(self, run: Run, known: Iterable[Sequence[str]]) -> None:
        """Restore what `state` yielded of a run. Raise TypeError or ValueError if it is damaged."""
        for row in known:
            identity, given = Identity(*map(str, row[: len(Identity._fields)])), row[len(Identity._fields) :]
            self._restored[tuple(map(str, given)), identity] = run

    def name(self, at: float, records: Sequence[Record]) -> Iterator[tuple[Run, Record]]:
        """Yield each record with the name of its run. Leave out those that may be of either of two jobs."""
        if self._restored_until == inf:
            self._restored_until = at + REMEMBERED_FOR
        if at > self._restored_until:
            self._restored.clear()
        by_run: dict[Run, list[Record]] = defaultdict(list)
        for one in records:
            by_run[one.found.run].append(one)
        self._identities = self._merged(records)
        names: dict[Process, tuple[Run, float]] = {}
        for run, of_run in by_run.items():
            jobs = [job for job in self._divide(at, run, of_run, by_run) if job.units]
            for job in jobs:
                if job.run:
                    names |= (kept := self._kept(at, job.run, job))
                    is_settled = any(at - since >= SETTLED for _, since in kept.values())
                    if is_settled and (len(jobs) > 1 or job.run != run):
                        self._remember(at, run, job.run, job)
        self._names = names
        self._logged &= by_run.keys()
        return ((names[one.found.process][0], one) for one in records if one.found.process in names)

    def _kept(self, at: float, name: Run, job: _Job) -> Mapping[Process, tuple[Run, float]]:
        """Return the name of each process of a job, and since when it has that name."""
        before = {one.found.process: self._names.get(one.found.process) for one in job.records}
        return {process: found if found and found[0] == name else (name, at) for process, found in before.items()}

    def _remember(self, at: float, given: Run, name: Run, job: _Job) -> None:
        """Remember a job of several with one name: its next processes may have another address."""
        self._past.pop(name, None)
        self._past[name] = _Past(given, job.identities, job.boots, at)
        if len(self._past) > PAST_LIMIT:
            del self._past[next(iter(self._past))]

    def _merged(self, records: Iterable[Record]) -> dict[Process, Identity]:
        """Return the identity of each process: of several targets, what was known first."""
        merged: dict[Process, Identity] = {}
        for one in records:
            process, new = one.found.process, one.found.identity
            before = merged.get(process) or self._identities.get(process)
            merged[process] = new if before in (None, new) else before.completed(new)
        return merged

    def _divide(self, at: float, run: Run, records: Sequence[Record], taken: Iterable[Run]) -> Iterable[_Job]:
        """Return the jobs of a run's name. Those of old processes first, then the oldest living ones."""
        units = self._units(records)
        jobs: dict[Run, _Job] = {}
        new: list[_Unit] = []
        for unit in units:
            if named := self._name_before(at, unit):
                jobs.setdefault(named, _Job(named)).units.append(unit)
            else:
                new.append(unit)
        found = [*jobs.values()]
        for name, past in self._past.items():
            if past.given == run and name not in jobs and at - past.at < REMEMBERED_FOR:
                found.append(_Job(name, past=past))
        for unit in sorted(new, key=lambda one: (not one.is_living, one.began)):
            self._place(run, unit, found)
        _give_names(run, found, {*taken})
        return found

    def _units(self, records: Iterable[Record]) -> Sequence[_Unit]:
        """Return the processes by identity. A namespace that is unknown is the only one that is known, if it is one."""
        found: dict[Identity, list[Record]] = defaultdict(list)
        for one in records:
            found[self._identities[one.found.process]].append(one)
        for identity in [one for one in found if not one.namespace]:
            known = [one for one in found if one.namespace and one._replace(namespace="") == identity]
            if len(known) == 1:
                found[known[0]] += found.pop(identity)
        return [_Unit(identity, of_unit) for identity, of_unit in found.items()]

    def _name_before(self, at: float, unit: _Unit) -> Run | None:
        """Return the name that the unit keeps; None if it is new."""
        given = unit.records[0].found.run
        names = [self._names[one.found.process] for one in unit.records if one.found.process in self._names]
        settled = next((name for name, since in names if at - since >= SETTLED), None)
        return settled or self._restored.get((given, unit.identity))

    def _place(self, run: Run, unit: _Unit, jobs: list[_Job]) -> None:
        """Add the unit to the job that it is part of, or to a new one; to none while that is unknown."""
        possible, is_unknown = [], False
        for job in (job for job in jobs if not job.contradicts(unit)):
            overlap, is_open = _overlap(job, unit)
            if overlap <= OVERLAP and is_open:
                is_unknown = True
            elif overlap <= OVERLAP:
                possible.append(job)
        if possible:
            max(possible, key=lambda job: job.likeness(unit)).units.append(unit)
        elif not is_unknown and sum(bool(job.units) for job in jobs) < JOBS_LIMIT:
            jobs.append(_Job(units=[unit]))
        elif not is_unknown and run not in self._logged:
            self._logged.add(run)
            logger.warning("too many jobs have one name; leaving out others run=%s limit=%d", run[0], JOBS_LIMIT)


def _overlap(job: _Job, unit: _Unit) -> tuple[float, bool]:
    """Return the longest time for which both had a process of one rank, and whether any two of them live now."""
    theirs: dict[int, list[Record]] = defaultdict(list)
    for one in job.records:
        theirs[one.rank].append(one)
    longest, is_open = 0.0, False
    for mine in unit.records:
        for other in theirs.get(mine.rank, ()):
            began = max(mine.found.reading.began, other.found.reading.began)
            longest = max(longest, min(mine.last_active, other.last_active) - began)
            is_open = is_open or (mine.is_living and other.is_living)
    return longest, is_open


def _give_names(run: Run, jobs: Sequence[_Job], taken: set[Run]) -> None:
    """Name the new jobs: the first one as the run, unless a living job has that name, the others by what differs."""
    taken |= {job.run for job in jobs if job.run}
    living = {job.run for job in jobs if job.is_living}
    for job in jobs:
        if job.run:
            continue
        ended = [one for one in jobs if one.run == run]
        if run not in living and not any(_overlap(one, unit)[0] > OVERLAP for one in ended for unit in job.units):
            job.run = run
        else:
            others = [one for one in jobs if one is not job]
            named = ((f"{run[0]} ({word})", *run[1:]) for word in _distinctions(job, others))
            job.run = next(one for one in named if one not in taken)
        taken.add(job.run)
        if job.is_living:
            living.add(job.run)


def _distinctions(job: _Job, others: Sequence[_Job]) -> Iterator[str]:
    """Yield words for what distinguishes a job from others, the most useful ones first, and then numbers."""
    for name, word in (("slurm_job", "job"), ("namespace", "namespace"), ("address", "rendezvous")):
        values = job.values(name)
        if values and not any(values & other.values(name) for other in others):
            yield f"{word} {min(values)}"
    first = min(job.records, key=lambda one: one.rank)
    yield f"node {first.node}"
    yield from map(str, range(2, 2 * JOBS_LIMIT + len(others)))
