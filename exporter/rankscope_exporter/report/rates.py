"""The busy time of each GPU and the speed of each run in the last ten minutes, for the charts of the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.ranks.look import Look

INTERVAL = 5.0
"""Seconds between two readings."""
KEPT_SECONDS = 600.0
STEP_WINDOW = 6
"""The number of intervals over which the steps are counted: few steps in one interval would be a jagged line."""


class Point(NamedTuple):
    """A rate at a moment."""

    age: float
    """Seconds before the newest reading."""
    rate: float


class _Reading(NamedTuple):
    at: float
    counter: float


_Series = deque[_Reading]
K = TypeVar("K")


class RecentRates:
    """Readings of a counter of each GPU and of each run. One thread records them; any thread may ask for the rates."""

    def __init__(self) -> None:
        self._busy: dict[str, _Series] = {}
        self._steps: dict[Run, _Series] = {}

    def record(self, look: Look) -> None:
        """Add the counters of one moment. GPUs and runs that are not there any more are dropped."""
        busy = {uuid: gpu.counters.busy for uuid, gpu in look.gpus.items() if gpu.counters.busy is not None}
        steps = {run: first.counters.steps for run, ranks in look.readings.items() if (first := _first(ranks))}
        self._busy, self._steps = _extended(self._busy, look.at, busy), _extended(self._steps, look.at, steps)

    def busy(self, uuid: str) -> Sequence[Point]:
        """Return the ratio of the time in which a kernel ran on the GPU, per interval."""
        return [Point(age, min(rate, 1.0)) for age, rate in _rates(self._busy.get(uuid, ()), 1)]

    def steps(self, run: Run) -> Sequence[Point]:
        """Return the run's steps per second."""
        return _rates(self._steps.get(run, ()), STEP_WINDOW)


def _first(ranks: Sequence[RankReading]) -> RankReading | None:
    return min((one for one in ranks if one.ended is None), key=lambda one: one.rank, default=None)


def _extended(known: Mapping[K, _Series], at: float, counters: Mapping[K, float]) -> dict[K, _Series]:
    """Return the series with one more reading. A counter that decreases is that of another process."""
    series = {}
    for key, counter in counters.items():
        before = known.get(key, ())
        is_same = not before or (before[-1].at < at and before[-1].counter <= counter)
        kept = (one for one in before if at - one.at <= KEPT_SECONDS) if is_same else ()
        series[key] = deque([*kept, _Reading(at, counter)])
    return series


def _rates(series: Sequence[_Reading], window: int) -> Sequence[Point]:
    readings = [*series]
    if not readings:
        return ()
    pairs = zip(readings, readings[window:], strict=False)
    return [Point(readings[-1].at - new.at, (new.counter - old.counter) / (new.at - old.at)) for old, new in pairs]
