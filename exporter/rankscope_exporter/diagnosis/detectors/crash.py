"""The first rank of the run that was killed or ended with an exception.

When one rank dies, torchrun stops the others within a second. The finding therefore names one rank: the first that was
killed, or else the first that raised an exception. A rank that has restarted is not a crash. If all ranks disappear
together after the same step while they make progress, the run may have ended normally, so there is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankscope_exporter.diagnosis.detectors.loss import Window, place
from rankscope_exporter.diagnosis.detectors.state import Past, StateDetector
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "crash"
SETTLE_SECONDS = 3.0  # time for the ends of the other ranks to be read


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
    first = min(candidates, key=_end)
    evidence = {"living_ranks": float(len(living)), "steps": first.counters.steps}
    age = first.at - _end(first)
    yield Candidate(KIND, 1.0, _reason(first), place(first), evidence, lasted=age, needed=SETTLE_SECONDS)


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
