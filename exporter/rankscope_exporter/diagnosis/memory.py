"""The memory of ranks on their GPUs over minutes: retries, failures, and steady growth.

The tensors that are left at the end of a step are the same in each step of most jobs: the parameters, the gradients and
the optimizer's state. A leak adds to them in each step, so that the least of each minute rises, and with it the peak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rankscope_exporter.diagnosis.readings import DeviceMemory, RankReading
from rankscope_exporter.diagnosis.saved import Time

ROWS = 20
"""The minutes over which growth is measured. Python's garbage collector frees cycles of tensors more often."""
RECENT, LATELY = 10, 2
"""The minutes over which retries and failures are counted, and those in which there has to be one."""
STEPS = 20
"""The fewest steps while memory grows, or between failures: a search for the batch size fails every few steps."""
FALL = 0.1
"""Ratio of the growth by which the memory may fall in between: what falls further is freed from time to time."""
EVEN = 0.6
"""Ratio to the growth in the first half of the minutes, which that in the second half has to have: caches fill up."""
ANOTHER = 1.0
"""Seconds by which a process begins later than another one. The analyzer's clocks differ by less."""
ROW_BYTES = 300


class MemoryRow(NamedTuple):
    """A minute of a rank: its least allocated memory, and its counters at the end."""

    rank: int
    began: float
    at: Time
    allocated: float
    peak: float
    retries: float
    failures: float
    steps: float


class MemoryTrend(NamedTuple):
    """The changes in the last minutes."""

    retries: float = 0.0
    """Allocations that succeeded after the allocator had freed its cache."""
    retry_minutes: int = 0
    """The minutes with a retry; 0 if there was none lately."""
    failures: float = 0.0
    """Allocations that failed, if the rank has made steps between them."""
    failure_minutes: int = 0
    full_in: float | None = None
    """The seconds until the memory is full, if it grows steadily."""


class MemoryHistory:
    """The last minutes of each rank that uses CUDA."""

    def __init__(self, minute: float) -> None:
        self._minute = minute
        self._rows: dict[int, deque[MemoryRow]] = {}
        self.trends: dict[int, MemoryTrend] = {}
        """The trend of each living rank."""

    def kept_bytes(self) -> int:
        """Return about how much memory it takes."""
        return ROW_BYTES * sum(map(len, self._rows.values()))

    def observe(self, at: float, ranks: Iterable[RankReading]) -> None:
        """Add the readings of the living ranks."""
        using = {one.rank: one for one in ranks if one.memory}
        for one in using.values():
            if one.memory:
                self._add(at, one, one.memory)
        for rank in self._rows.keys() - using.keys():
            del self._rows[rank]
        for rank in self.trends.keys() - using.keys():
            del self.trends[rank]

    def _add(self, at: float, one: RankReading, memory: DeviceMemory) -> None:
        rows = self._rows.setdefault(one.rank, deque(maxlen=ROWS + 1))
        if rows and one.began - rows[-1].began > ANOTHER:
            rows.clear()
        now = MemoryRow(
            one.rank, one.began, at, memory.allocated, memory.peak, memory.retries, memory.failures, one.counters.steps
        )
        last = rows[-1] if rows else now
        is_open = len(rows) > 1 and at - rows[-2].at < self._minute  # the newest row is not complete
        if is_open:
            rows[-1] = now._replace(allocated=min(last.allocated, memory.allocated))
        else:
            rows.append(now)
        has_event = (now.retries, now.failures) != (last.retries, last.failures)
        if has_event or not is_open or one.rank not in self.trends:
            self.trends[one.rank] = _trend(tuple(rows), memory.capacity)

    @property
    def rows(self) -> Sequence[MemoryRow]:
        """Return all rows, to save them."""
        return [row for rows in self._rows.values() for row in rows]

    def restore(self, rows: Iterable[MemoryRow]) -> None:
        """Restore saved rows."""
        for row in rows:
            self._rows.setdefault(row.rank, deque(maxlen=ROWS + 1)).append(row)


def _trend(rows: Sequence[MemoryRow], capacity: float | None) -> MemoryTrend:
    minutes = [*pairwise(rows[-RECENT - 1 :])]
    failures = [new.failures - old.failures for old, new in minutes]
    retries = [new.retries - old.retries - failed for (old, new), failed in zip(minutes, failures, strict=True)]
    with_failures = [(old, new) for old, new in minutes if new.failures > old.failures]
    if with_failures and with_failures[-1][0].steps - with_failures[0][0].steps < STEPS:
        failures = []
    return MemoryTrend(
        sum(retries), _minutes(retries), sum(failures), _minutes(failures), _full_in(rows[:-1], capacity)
    )  # fmt: skip


def _minutes(events: Sequence[float]) -> int:
    """Return the number of minutes with an event; 0 if there was none lately."""
    return sum(one > 0.0 for one in events) if any(events[-LATELY:]) else 0


def _full_in(rows: Sequence[MemoryRow], capacity: float | None) -> float | None:
    """Return the seconds until the memory is full, by complete minutes; None unless it grows steadily toward that."""
    if capacity is None or len(rows) < ROWS or rows[-1].steps - rows[0].steps < STEPS:
        return None
    first, middle, last = rows[0], rows[len(rows) // 2], rows[-1]
    growth = last.allocated - first.allocated
    highest = accumulate((row.allocated for row in rows), max)
    fall = max(most - row.allocated for most, row in zip(highest, rows, strict=True))
    is_even = last.allocated - middle.allocated >= EVEN * (middle.allocated - first.allocated)
    if growth <= 0.0 or not (fall <= FALL * growth and is_even and last.peak - first.peak >= EVEN * growth):
        return None
    return max(capacity - last.peak, 0.0) * (last.at - first.at) / growth
