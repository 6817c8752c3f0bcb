"""The first rank of the run that was killed or ended with an exception.

When one rank dies, torchrun stops the others within a second. The finding therefore names one rank: the first that was
killed, or else the first that raised an exception. A rank that has restarted is not a crash. If all ranks disappear
together after the same step while they make progress, the run may have ended normally, so there is no finding.

If ranks of several nodes ended within the error of their clocks, the first one is unknown, and the finding names these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "crash"
SETTLE_SECONDS = 3.0  # time for the ends of the other ranks to be read
READ_SECONDS = 1.0  # between two readings: a killed rank ended between them


def detect(window: Window, _past: Past) -> Iterator[Candidate]:
    """Yield the crash."""
    run = window.run
    living = {one.rank for one in run.ranks}
    ended = [reading for reading in run.ended if reading.rank not in living]
    killed = [reading for reading in ended if _reason(reading) == "killed"]
    if killed and has_ended_together(run, ended, window.thresholds):
        killed = []
    candidates = killed or [reading for reading in ended if _reason(reading) == "exception"]
    if not candidates:
        return
    first, *others = sorted(candidates, key=_end)
    ranks = tuple(sorted({one.rank for one in (first, *others) if not _is_later(one, first)}))
    where = place(first) if len(ranks) == 1 else Place(group=first.group, ranks=ranks)
    evidence = {"living_ranks": float(len(living)), "steps": first.counters.steps}
    age = first.at - _end(first)
    yield Candidate(KIND, 1.0, _reason(first), where, evidence, lasted=age, needed=SETTLE_SECONDS)


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
