"""The first rank of the run that was killed or ended with an exception.

When one rank dies, torchrun stops the others within a second. The finding therefore names one rank: the first that was
killed, or else the first that raised an exception. A rank that has restarted is not a crash. If all ranks disappear
together after the same step while they make progress, the run may have ended normally, so there is no finding, unless
the kernel's out-of-memory killer was at work: it may end all processes of a container.

If ranks of several nodes ended within the error of their clocks, the first one is unknown, and the finding names these,
or those of them whose exception says that memory was exhausted.

The cause is `killed` or `exception`, or what the end says about memory:

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

from collections.abc import Iterator, Sequence

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.out_of_memory import reason
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import EVIDENCE_LIMIT, Candidate, Place
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "crash"
MEMORY, OOM_KILLER = "out_of_memory", "oom_killer"
LACKS = {"device": MEMORY, "host": "host_memory", "shared": "shared_memory"}
"""The causes by the memory that the exception lacked."""
LACKING = {*LACKS.values(), OOM_KILLER}
SETTLE_SECONDS = 3.0  # time for the ends of the other ranks to be read
KILL_SECONDS = 10.0  # between the kernel's kill and the end: a rank notices within a step that a worker is gone
READ_SECONDS = 1.0  # between two readings: a killed rank ended between them


def detect(window: Window, past: Past) -> Iterator[Candidate]:
    """Yield the crash."""
    run = window.run
    living = {one.rank for one in run.ranks}
    ended = [reading for reading in run.ended if reading.rank not in living]
    causes = {reading.rank: _cause(reading, past) for reading in ended}
    killed = [reading for reading in ended if _reason(reading) == "killed"]
    if killed and has_ended_together(run, ended, window.thresholds) and OOM_KILLER not in causes.values():
        killed = []
    exceptions = [reading for reading in ended if _reason(reading) == "exception"]
    if not killed and not exceptions:
        return
    first = min(killed or exceptions, key=_end)
    lacking = [one for one in exceptions if causes[one.rank] in LACKING]
    lacking = [one for one in lacking if _end(one) <= _end(first) or not _is_later(one, first)]
    candidates = lacking or killed or exceptions
    first = min(candidates, key=_end)
    ranks = tuple(sorted({one.rank for one in candidates if not _is_later(one, first)}))
    where = place(first) if len(ranks) == 1 else Place(group=first.group, ranks=ranks)
    cause, phase = causes[first.rank], first.ended.phase if first.ended else ""
    evidence = {"living_ranks": float(len(living)), "steps": first.counters.steps}
    evidence = (cause == MEMORY and _memory(window, first, past)) or evidence
    age = first.at - _end(first)
    yield Candidate(KIND, 1.0, cause, where, evidence, age, SETTLE_SECONDS, phase=phase if cause == MEMORY else "")


def _cause(one: RankReading, past: Past) -> str:
    """Return the cause of a rank's end."""
    exhausted, before = one.ended.exhausted if one.ended else "", past.alive.get(one.rank)
    if exhausted in LACKS:
        return LACKS[exhausted]
    if exhausted == "worker" or _reason(one) == "killed":
        is_at_end = one.oom_killed_at is not None and abs(one.oom_killed_at - _end(one)) < KILL_SECONDS
        return OOM_KILLER if is_at_end else _reason(one)
    has_failed = one.memory and before and before.memory and one.memory.failures > before.memory.failures
    return MEMORY if has_failed and _reason(one) == "exception" else _reason(one)


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
    error = one.clock_error + first.clock_error + (READ_SECONDS if _reason(one) == "killed" else 0.0)
    return _end(one) - _end(first) > error


def has_ended_together(run: RunFacts, ended: Sequence[RankReading], thresholds: Thresholds) -> bool:
    """Return whether all ranks disappeared at the same time, after the same step, while they made progress."""
    if run.ranks or len(ended) < 2 or any(_reason(reading) != "killed" for reading in ended):
        return False
    ends = [_end(reading) for reading in ended]
    return (
        len({reading.counters.steps for reading in ended}) == 1
        and max(ends) - min(ends) < SETTLE_SECONDS
        and max(ends) - min(reading.last_progress for reading in ended) < thresholds.works_until_its_end
    )


def _reason(reading: RankReading) -> str:
    return reading.ended.reason if reading.ended else ""


def _end(reading: RankReading) -> float:
    return reading.ended.at if reading.ended else reading.at


DETECTORS = (StateDetector(KIND, detect, is_critical=True, is_one_per_run=True),)
