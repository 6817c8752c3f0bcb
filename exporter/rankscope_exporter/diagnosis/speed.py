"""The speed of a run in its past, and whether it is slower now at the same work.

A row has the mean step of about a minute: its seconds, the work that it did, and what may slow it down. Only rows with
the same work are compared. Waits for other ranks, data and copies do not count: they are losses of their own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, median_high
from typing import NamedTuple

from rankscope.record import phases
from rankscope_exporter.diagnosis.facts import DEVICE, WAIT, RankFacts, RunFacts, compare
from rankscope_exporter.diagnosis.lost import throttling
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.saved import Time, rounded
from rankscope_exporter.diagnosis.thresholds import Thresholds

Numbers = Mapping[str, float]

SPAN_ROWS, ROWS = 10, 90
"""The rows in the time for which a run has to be slower, and the rows that are kept."""
ROW_STEPS = 4
"""The fewest steps of a row: the part of a step at either end is a small part of its work."""
LEAST_ROWS, LEAST_BEFORE = 8, 5
"""The fewest rows in the time for which a run has to be slower, and before it."""
SLOW_ROWS, SLOW_BEFORE = 0.9, 0.25
"""The least ratio of slow rows in that time, and the largest one before it, beyond which the run is often slow."""
SAME_WORK = 0.1
"""The largest change that is no other work. With a tenth more tokens, a step whose time grows with their square takes
1.21 times as long."""
OTHER_LOSSES = (WAIT, "data_wait", "h2d_copy", *phases.PLANNED)
ON_DEVICE = (*phases.COMPUTING, "device_wait")
ANY_WORK = ("samples", "tokens", "copied_bytes", "bytes")
"""What shows whether steps do the same. The number of passes and collectives alone does not."""
ROW_BYTES = 2000


class Row(NamedTuple):
    """The mean step in a part of the run's time."""

    at: Time
    """The end of the part."""
    seconds: float
    """Seconds of a step, without planned phases."""
    own: Numbers
    """Seconds of a step by phase, without other losses."""
    work: Numbers
    """What all ranks do in a step."""
    state: Numbers
    """What may slow a step down."""

    @property
    def own_seconds(self) -> float:
        """Return the seconds of a step without other losses."""
        return sum(self.own.values())


class Slower(NamedTuple):
    """A run that is slower than it was."""

    ratio: float
    """The ratio of its time that it loses."""
    cause: str
    since: Time
    before: Row
    now: Row


class Speed:
    """The past of a run."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._row_seconds = thresholds.slower_seconds / SPAN_ROWS
        self.rows: deque[Row] = deque(maxlen=ROWS)
        self._begin: tuple[float, Mapping[int, RankReading]] | None = None
        """The readings at the end of the newest row."""
        self._steps = math.inf
        self.slower: Slower | None = None

    def forget(self) -> None:
        """Drop the past, because the ranks' processes have changed."""
        self.rows.clear()
        self._begin, self._steps, self.slower = None, math.inf, None

    def observe(self, at: float, run: Run, readings: Mapping[int, RankReading]) -> None:
        """Add the readings of one moment. A row begins and ends when a step has ended."""
        last = self._steps
        self._steps = max((one.counters.iterations for one in readings.values() if one.ended is None), default=math.inf)
        if self._steps <= last:
            return
        if self._begin is None:
            self._begin = at, readings
        began, then = self._begin
        both = [(one.counters, then[rank].counters) for rank, one in readings.items() if not one.ended and rank in then]
        made = min((now.iterations - before.iterations for now, before in both), default=0.0)
        if at - began >= self._row_seconds and made >= ROW_STEPS:
            self._begin = at, readings
            self.rows.append(_row(at, compare(run, then, readings)))
            self.slower = self._go_on(self.slower) if self.slower else self._find()

    def _find(self) -> Slower | None:
        """Return how much slower the run has been for long enough, and why."""
        rows, limits = [*self.rows], self._thresholds
        enough = limits.slower_seconds - self._row_seconds / 2
        counts = (count for count in range(LEAST_ROWS, len(rows)) if rows[-1].at - rows[-count - 1].at >= enough)
        count = next(counts, len(rows))
        now = _middle(rows[-count:])
        earlier = [row for row in rows[:-count] if _is_same_work(row, now)]
        if len(earlier) < LEAST_BEFORE:
            return None
        before = _middle(earlier)
        is_slow = [self._is_slow(row, before) and _is_same_work(row, now) for row in rows[-count:]]
        was_slow = sum(self._is_slow(row, before) for row in earlier)
        if sum(is_slow) < SLOW_ROWS * count or was_slow > SLOW_BEFORE * len(earlier):
            return None
        began = len(rows) - count + is_slow.index(True)
        while self._is_slow(rows[began - 1], before):
            began -= 1
        cause = _cause(before, now, limits)
        return _slower(cause, rows[began - 1].at, before, now) if cause else None

    def _go_on(self, slower: Slower) -> Slower | None:
        """Return how much slower the run is now; None if the newest rows are not slow, or do other work."""
        before = slower.before
        newest, limit = [*self.rows][-2:], self._thresholds.release
        if not any(_is_same_work(row, before) and self._is_slow(row, before, limit) for row in newest):
            return None
        return _slower(slower.cause, slower.since, before, _middle(newest))

    def _is_slow(self, row: Row, before: Row, part: float = 1.0) -> bool:
        return row.own_seconds - before.own_seconds >= part * self._thresholds.slower * before.seconds


def _slower(cause: str, since: float, before: Row, now: Row) -> Slower:
    return Slower((now.own_seconds - before.own_seconds) / now.seconds, cause, since, before, now)


def _row(at: float, run: RunFacts) -> Row:
    def of_phase(phase: str) -> float:
        return run.lower_median(lambda one: one.step_ratios.get(phase, 0.0) * _step_seconds(one)) or 0.0

    names = sorted({phase for one in run.ranks for phase in one.step_ratios} - {*OTHER_LOSSES})
    seconds = run.lower_median(_step_seconds) or 0.0
    numbers = {phase: of_phase(phase) for phase in names}, _work(run), _state(run)
    return Row(at, seconds, *({name: rounded(value) for name, value in one.items()} for one in numbers))


def _step_seconds(one: RankFacts) -> float:
    aligned = one.spent.aligned
    if aligned.steps:
        return aligned.seconds / aligned.steps
    return one.unplanned_seconds / one.spent.iterations


def _work(run: RunFacts) -> Numbers:
    """Return by name what the ranks do in a step. What one of them does not count is absent."""
    counted: Mapping[str, Sequence[float | None]] = {
        "samples": [one.spent.samples for one in run.ranks],
        "tokens": [one.spent.tokens for one in run.ranks],
        "copied_bytes": [one.spent.copied_bytes for one in run.ranks],
        "micro_steps": [one.spent.micro_steps for one in run.ranks],
        "collectives": [sum(one.spent.collectives.calls.values()) for one in run.ranks],
        "bytes": [sum(one.spent.collectives.bytes.values()) for one in run.ranks],
    }
    steps = fmean(one.spent.iterations for one in run.ranks)
    memory = [one.now.gpu.memory_ratio for one in run.ranks if one.now.gpu and one.now.gpu.memory_ratio is not None]
    of_step = {name: fmean(value or 0.0 for value in of) / steps for name, of in counted.items() if all(of)}
    of_gpus = {"memory": fmean(memory)} if memory else {}
    return {**of_step, **of_gpus, "measured_on_device": float(sum(one.clock == DEVICE for one in run.ranks))}


def _state(run: RunFacts) -> Numbers:
    """Return what may slow a step down, of the median rank: a single one has findings of its own."""

    clocks = [clock for one in run.ranks if (clock := throttling(one)[1]) is not None]
    found = {
        "run_queue": run.lower_median(lambda one: one.rate(one.spent.process.run_queue)),
        "cpu": run.lower_median(lambda one: one.rate(one.spent.process.cpu)),
        "busy": run.lower_median(lambda one: one.rate(one.spent.gpu.busy)),
        "throttled": run.lower_median(lambda one: throttling(one)[0]),
        "clock": median_high(clocks) if clocks else None,
        "processes": run.lower_median(run.foreign_processes),
    }
    return {name: value for name, value in found.items() if value is not None}


def _middle(rows: Sequence[Row]) -> Row:
    """Return a row with the median of each number, over the rows that have it."""
    of_rows = [row.own for row in rows], [row.work for row in rows], [row.state for row in rows]
    own, work, state = (
        {name: median(row[name] for row in each if name in row) for name in set[str]().union(*each)} for each in of_rows
    )
    return Row(rows[-1].at, median(row.seconds for row in rows), own, work, state)


def _is_same_work(one: Row, other: Row) -> bool:
    """Return whether steps do the same. The GPUs' memory counts if tokens are unknown, and no other process uses it."""
    has_memory = "tokens" not in one.work and one.state.get("processes") == other.state.get("processes")
    names = (one.work.keys() | other.work.keys()) - {"memory" if not has_memory else ""}
    return all(math.isclose(one.work.get(name, -1.0), other.work.get(name, -1.0), rel_tol=SAME_WORK) for name in names)


def _cause(before: Row, now: Row, thresholds: Thresholds) -> str:
    """Return what has changed and explains enough of the longer steps; empty if nothing is known to.

    The cause may be unknown only if tokens are counted, and outside of the model only if they or samples are: else a
    step may do more than is known, such as longer rollouts.
    """
    if not any(name in now.work for name in ANY_WORK):
        return ""
    longer = now.own_seconds - before.own_seconds
    grown = {name: now.state[name] - value for name, value in before.state.items() if name in now.state}
    needed = thresholds.cause * longer
    at_lower_clock = -now.own_seconds * grown.get("clock", 0.0)
    if at_lower_clock > needed * before.state.get("clock", 1.0) and grown.get("busy", 0.0) > -SAME_WORK:
        return "throttled" if grown.get("throttled", 0.0) > thresholds.throttled else "clocks"
    if grown.get("processes", 0.0) > 0.0:
        return "foreign_process"
    queue, cpu = (_seconds(name, now) - _seconds(name, before) for name in ("run_queue", "cpu"))
    if queue > needed:
        return "cpu_contention"
    outside = sum(now.own[name] - before.own.get(name, 0.0) for name in now.own.keys() - ON_DEVICE)
    if outside > longer / 2.0 and ("samples" in now.work or "tokens" in now.work):
        return "io" if "cpu" in grown and cpu < thresholds.cause * outside else "other"
    return "unknown" if "tokens" in now.work else ""


def _seconds(name: str, row: Row) -> float:
    """Return a ratio of the time in seconds of a step."""
    return row.state.get(name, 0.0) * row.seconds
