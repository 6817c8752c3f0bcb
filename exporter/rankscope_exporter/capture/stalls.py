"""The choice of runs to capture: those that stand still on this node, hang by a finding, or have a rank that crashed.

A run is captured before its finding, when none of its ranks on this node has made progress for twice the longest time
for which that was so before, or for the longest step if that is longer, and for at least 30 s. NCCL's watchdog ends
many jobs ten minutes later. So this includes runs that span nodes, whose finding is made elsewhere. Before its first
step, a run is captured after ten minutes without progress. It is captured again when the finding `hang` opens, here or
at the analyzer, and when a rank has crashed. Each of these happens once until the run makes progress again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from rankscope_exporter.diagnosis.detectors.crash import SETTLE_SECONDS
from rankscope_exporter.diagnosis.judge import Verdict
from rankscope_exporter.diagnosis.judged import LIMITS, of_newest_start
from rankscope_exporter.diagnosis.readings import RankReading, Run, are_stopped
from rankscope_exporter.diagnosis.standstill import OTHER, has_progress
from rankscope_exporter.diagnosis.step_times import longest_step
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.report.describe import FAILED

STANDSTILL, HANG, CRASH = "standstill", "hang", "crash"
LEAST_SECONDS, GAPS = 30.0, 2.0
"""The shortest standstill that is captured, and the multiple of the longest one before."""
START_SECONDS = 600.0
"""The same before the first step, when there is no longest one: loading a large model takes minutes."""


UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)


@dataclass
class _Pace:
    """The progress of one run on this node. Times are seconds of CLOCK_MONOTONIC."""

    living: Sequence[RankReading]
    moved_at: float
    longest: float
    """The longest time without progress since the first step."""
    captured: set[str] = field(default_factory=set)
    """The reasons for which it was captured since the last progress."""


class Stalls:
    """The progress of all runs. Not thread-safe."""

    def __init__(self) -> None:
        self._paces: dict[Run, _Pace] = {}

    def update(self, look: Look, hanging: Collection[Run] = ()) -> Iterator[tuple[Run, str]]:
        """Add one poll, and yield the runs to capture now with the reason. `hanging` are those by the analyzer."""
        verdicts = {verdict.run: verdict for verdict in look.judged.verdicts}
        before, self._paces = self._paces, {}
        for run, readings in look.readings.items():
            if not readings or look.judged.not_judged.get(run) in LIMITS:
                continue
            ranks = of_newest_start(readings)
            try:
                pace = self._paces[run] = _updated(before.get(run), look.at, ranks)
                reasons = [*_reasons(pace, look.at, ranks, verdicts.get(run), is_hanging=run in hanging)]
            except UNREADABLE:  # of a forged record; other runs must not be affected
                continue
            for reason in reasons:
                if reason not in pace.captured:
                    pace.captured |= {reason, STANDSTILL}  # a later capture has all that an earlier one has
                    yield run, reason

    def give_up(self, run: Run) -> None:
        """Yield a run whose capture failed not again until it has made progress. Any thread may call it."""
        if pace := self._paces.get(run):
            pace.captured |= {STANDSTILL, HANG}

    def is_wanted(self, run: Run, reason: str) -> bool:
        """Return whether a run still stands as it did when it was yielded with this reason."""
        return run in self._paces and reason in self._paces[run].captured


def _updated(pace: _Pace | None, at: float, ranks: Sequence[RankReading]) -> _Pace:
    living = [one for one in ranks if one.ended is None]
    if pace is None or _has_begun(pace.living, living):
        seconds = max((longest_step(one.counters.step_buckets) for one in living), default=0.0)
        moved_at = max((min(one.last_progress, at) for one in living), default=at)
        return _Pace(living, moved_at, seconds if isfinite(seconds) else 0.0)
    if has_progress(pace.living, living):
        if _iterations(pace.living):
            pace.longest = max(pace.longest, at - pace.moved_at)
        pace.moved_at = at
        pace.captured &= {CRASH}
    elif are_stopped(living):  # as by a scheduler that suspends the job: no standstill of the ranks'
        pace.moved_at = at
    pace.living = living or pace.living
    return pace


def _has_begun(before: Sequence[RankReading], living: Sequence[RankReading]) -> bool:
    """Return whether all ranks are new processes: the run has started again."""
    known = {(one.rank, one.began) for one in before}
    return bool(living) and not any((one.rank, one.began) in known for one in living)


def _iterations(living: Sequence[RankReading]) -> float:
    return max((one.counters.iterations for one in living), default=0.0)


def _reasons(
    pace: _Pace, at: float, ranks: Sequence[RankReading], verdict: Verdict | None, *, is_hanging: bool
) -> Iterator[str]:
    """Yield why the run should be captured, the most specific reason first."""
    living = [one for one in ranks if one.ended is None]
    found = {one.kind: one for one in verdict.findings} if verdict else {}
    if CRASH in found or (verdict is None and _has_crashed(ranks, at)):
        yield CRASH
    is_hanging = is_hanging and verdict is None and bool(living) and at - pace.moved_at >= LEAST_SECONDS
    if is_hanging or (HANG in found and found[HANG].opened > pace.moved_at):
        yield HANG
    limit = max(LEAST_SECONDS, GAPS * pace.longest) if _iterations(living) else START_SECONDS
    if living and not _is_interactive(living) and at - pace.moved_at >= limit:
        yield STANDSTILL


def _has_crashed(ranks: Sequence[RankReading], at: float) -> bool:
    """Return whether a rank of a run that is judged elsewhere has failed here, and the others' ends have been read."""
    return any(one.ended and one.ended.reason in FAILED and at - one.ended.at >= SETTLE_SECONDS for one in ranks)


def _is_interactive(living: Sequence[RankReading]) -> bool:
    """Return whether it may be a prompt or a notebook, which waits for input."""
    return len(living) == 1 and living[0].world_size == 1 and living[0].phase == OTHER
