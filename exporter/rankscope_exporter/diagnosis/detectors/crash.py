"""The rank that ended first in a run of which a rank was killed or ended with an exception.

When one rank ends, the others lose their connection to it, and torchrun stops them within a second. The finding
therefore names one rank, the first of these that there is:

1. One whose exception, or end, says that memory was exhausted.
2. One that left before a rank failed, and within a minute of the last progress. It finished with fewer collectives than
   the others (cause `finished`): `sys.exit(0)`, or fewer batches. Or SIGTERM or Ctrl-C ended it (`sigterm`,
   `interrupted`), and not the launcher's after the failure.
3. The first that was killed, unless it was still alive ten seconds after an exception of another rank.
4. The first with an exception that does not say that its connection to another rank broke.
5. The first of all (cause `lost_peer`): it failed because another rank ended, and which one did is unknown. While ranks
   are alive, this takes longer, because the reason may be one of those that are about to end.

A rank that has restarted is not a crash, nor is a run whose ranks have all left. If all ranks disappear together after
the same step while they make progress, the run may have ended normally, so there is no finding, unless the kernel's
out-of-memory killer was at work: it may end all processes of a container.

If ranks of several nodes ended within the error of their clocks, the first one is unknown, and the finding names these.

Other causes are `killed` and `exception`, or what the end says about memory:

- `out_of_memory`: the exception, or one that it was raised from, says that the GPU's memory was exhausted; or an
  allocation of the rank failed since its last reading, before another exception ended it. The evidence has the peak and
  the capacity, and memory of other processes or unused memory of the allocator, if it is as much as the allocation
  that failed. The phase is that of the exception.
- `host_memory`, `shared_memory`: the same for the host's memory and for /dev/shm
- `oom_killer`: it was killed, or a loader worker was, and within ten seconds of its end the kernel's out-of-memory
  killer ended a process of its node (`oom_kill` in /proc/vmstat)

A rank without memory ends with an exception, after which its launcher kills the others: it comes before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankscope_exporter.diagnosis.departures import (
    STOPPED_BY,
    ended_at,
    find_departed,
    has_lost_peer,
    is_before,
    reason_of,
)
from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.out_of_memory import reason
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import EVIDENCE_LIMIT, Candidate, Place
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.standstill import FINISHED
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "crash"
MEMORY, OOM_KILLER = "out_of_memory", "oom_killer"
LACKS = {"device": MEMORY, "host": "host_memory", "shared": "shared_memory"}
"""The causes by the memory that the exception lacked."""
LACKING = {*LACKS.values(), OOM_KILLER}
LOST_PEER = "lost_peer"
LEFT = {FINISHED, *STOPPED_BY}
"""The causes that name a rank which has not failed itself."""
SETTLE_SECONDS = 3.0  # time for the ends of the other ranks to be read
ENDS_WITHIN = 15.0  # the same while it is unknown which one ended first, and a rank may still be about to end
KILL_SECONDS = 10.0  # between the kernel's kill and the end: a rank notices within a step that a worker is gone
DIES_WITHIN = 10.0  # a killed process may close its connections long before the driver has freed its memory
READ_SECONDS = 1.0  # between two readings: a killed rank ended between them
Ranks = Sequence[RankReading]


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the crash."""
    run = window.run
    living = {one.rank for one in run.ranks}
    ended = [reading for reading in run.ended if reading.rank not in living]
    causes = {reading.rank: _cause(reading, past) for reading in ended}
    killed = [reading for reading in ended if reason_of(reading) == "killed"]
    if killed and has_ended_together(run, ended, window.thresholds) and OOM_KILLER not in causes.values():
        killed = []
    exceptions = [reading for reading in ended if reason_of(reading) == "exception"]
    if not killed and not exceptions:
        return
    failed = {one.rank: one for one in (*killed, *exceptions)}
    others = [one for one in (*(rank.now for rank in run.ranks), *ended) if one.rank not in failed]
    departed = find_departed(others, [*failed.values()], past.alive)
    candidates = _lacking(killed, exceptions, causes) or departed or _first_failed(killed, exceptions, past)
    first = min(candidates, key=ended_at)
    ranks = tuple(sorted({one.rank for one in candidates if not _is_later(one, first)}))
    where = place(first) if len(ranks) == 1 else Place(group=first.group, ranks=ranks)
    cause = causes[first.rank] if first.rank in failed else reason_of(first)
    phase = first.ended.phase if first.ended and cause == MEMORY else ""
    evidence = {"living_ranks": float(len(living)), "steps": first.counters.steps}
    evidence = (cause == MEMORY and _memory(window, first, past)) or evidence
    failure = first if first.rank in failed else min(failed.values(), key=ended_at)
    age = failure.at - ended_at(failure)
    needed = ENDS_WITHIN if cause == LOST_PEER and living else SETTLE_SECONDS
    yield Candidate(KIND, 1.0, cause, where, evidence, age, needed, phase=phase)


def _lacking(killed: Ranks, exceptions: Ranks, causes: Mapping[int, str]) -> Ranks:
    """Return the ranks that ended for lack of memory before, or when, the first one ended."""
    first = min(killed or exceptions, key=ended_at)
    lacking = [one for one in exceptions if causes[one.rank] in LACKING]
    return [one for one in lacking if ended_at(one) <= ended_at(first) or not _is_later(one, first)]


def _first_failed(killed: Ranks, exceptions: Ranks, past: Past) -> Ranks:
    """Return the killed ranks, or else the exceptions that may be the reason for others."""
    earliest = min(exceptions, key=ended_at, default=None)
    killed = [one for one in killed if not (earliest and is_before(earliest, one, past.alive, DIES_WITHIN))]
    return killed or [one for one in exceptions if not has_lost_peer(one)] or exceptions


def _cause(one: RankReading, past: Past) -> str:
    """Return the cause of a rank's end."""
    exhausted, before = one.ended.exhausted if one.ended else "", past.alive.get(one.rank)
    if exhausted in LACKS:
        return LACKS[exhausted]
    if exhausted == "worker" or reason_of(one) == "killed":
        is_at_end = one.oom_killed_at is not None and abs(one.oom_killed_at - ended_at(one)) < KILL_SECONDS
        return OOM_KILLER if is_at_end else reason_of(one)
    if has_lost_peer(one):
        return LOST_PEER
    has_failed = one.memory and before and before.memory and one.memory.failures > before.memory.failures
    return MEMORY if has_failed and reason_of(one) == "exception" else reason_of(one)


def _memory(window: Window, first: RankReading, past: Past) -> dict[str, float]:
    """Return the evidence of a rank that ended for lack of memory on its GPU; empty if its counters are unknown."""
    if first.memory is None:
        return {}
    everyone = [*(one.now for one in window.run.ranks), *window.run.ended]
    peaks = sum(one.memory.peak for one in everyone if one.uuid == first.uuid and one.memory)
    requested = first.ended.requested_bytes if first.ended else None
    before = past.alive.get(first.rank, first)
    found = reason(before, first.memory, peaks, window.thresholds, requested)[1]
    return found | ({"requested": requested} if requested and len(found) < EVIDENCE_LIMIT else {})


def _is_later(one: RankReading, first: RankReading) -> bool:
    """Return whether a rank is known to have ended after the first one. On one node, the clock decides."""
    if one.node == first.node or not one.clock_error:
        return one.rank != first.rank
    error = one.clock_error + first.clock_error + (READ_SECONDS if reason_of(one) == "killed" else 0.0)
    return ended_at(one) - ended_at(first) > error


def has_ended_together(run: RunFacts, ended: Sequence[RankReading], thresholds: Thresholds) -> bool:
    """Return whether all ranks disappeared at the same time, after the same step, while they made progress."""
    if run.ranks or len(ended) < 2 or any(reason_of(reading) != "killed" for reading in ended):
        return False
    ends = [ended_at(reading) for reading in ended]
    return (
        len({reading.counters.steps for reading in ended}) == 1
        and max(ends) - min(ends) < SETTLE_SECONDS
        and max(ends) - min(reading.last_progress for reading in ended) < thresholds.works_until_its_end
    )


DETECTORS = (StateDetector(KIND, detect, is_critical=True, is_one_per_run=True),)
