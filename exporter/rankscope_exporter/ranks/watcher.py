"""The thread that polls all ranks once a second, so that a scrape only reads finished results.

Reading eight ranks' records, comparing their steps and reading their processes and loader workers takes milliseconds,
and a file system that hangs would block the scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.worker import Worker

INTERVAL = 1.0  # seconds; a ring has 128 steps, so only jobs with more steps per second lose some
STALE_AFTER = 5.0  # seconds after which results are absent, as for GPUs
FIRST_POLL = 1.0  # seconds that the start waits for the first poll
POLL_TIMEOUT = 1.0  # seconds that the next collector waits for a late one; then they poll in parallel


class OutdatedError(Exception):
    """The ranks were not read for too long: a run directory hangs, or a poll takes too long."""


class RankCollector(Protocol):
    """A collector that is polled once a second. If it raises or is late, only its own metrics are absent."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""

    def poll(self, scan: Scan) -> Sequence[Metric]:
        """Return its metrics for the ranks of a scan."""


class PolledCollector:
    """A rank collector with its own polling thread, and the results of its last poll for scrapes."""

    def __init__(self, collector: RankCollector, age: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Create the thread. `age` returns the seconds since the ranks were last read."""
        self.name = collector.name
        self.collector = collector
        self._age = age
        self._monotonic = monotonic
        self._latest: tuple[float, Sequence[Metric] | Exception] | None = None
        self._scans = SimpleQueue[tuple[float, Scan] | None]()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread = threading.Thread(target=self._run, name=f"ranks-{self.name}", daemon=True)

    def poll(self, scan: Scan, read_at: float, timeout: float) -> None:
        """Poll the collector, and wait up to `timeout` seconds. A collector that is still busy misses the scan."""
        if not self._is_idle.is_set():
            return
        if self._thread.ident is None:
            self._thread.start()
        self._is_idle.clear()
        self._scans.put((read_at, scan))
        self._is_idle.wait(timeout)

    def end(self) -> None:
        """End the thread, and wait up to POLL_TIMEOUT for it."""
        self._scans.put(None)
        if self._thread.ident is not None:
            self._thread.join(POLL_TIMEOUT)

    def collect(self) -> Sequence[Metric]:
        """Return the result of the last poll.

        Raise the poll's exception, or OutdatedError if the scan or the poll is too long ago.
        """
        if (age := self._age()) > STALE_AFTER:
            raise OutdatedError(f"the run directories were last read {age:.0f} s ago")
        if self._latest is None:
            raise OutdatedError("the run directories have not been read yet")
        read_at, latest = self._latest
        if (age := self._monotonic() - read_at) > STALE_AFTER:
            raise OutdatedError(f"the poll takes too long; the last result is {age:.0f} s old")
        if isinstance(latest, Exception):
            raise latest
        return latest

    def _run(self) -> None:
        while work := self._scans.get():
            read_at, scan = work
            self._latest = read_at, _poll(self.collector, scan)
            self._is_idle.set()


class RankWatcher(Worker):
    """The thread that scans the run directories and polls all collectors."""

    def __init__(
        self,
        run_directory: RunDirectory,
        collectors: Iterable[RankCollector],
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("ranks", interval, self._try_to_poll, "cannot read the run directories", self._end)
        self._run_directory = run_directory
        self._monotonic = monotonic
        self._scan: Scan | None = None
        self._polled_at = monotonic()
        self._has_polled = threading.Event()
        self.collectors = [PolledCollector(collector, self._age, monotonic) for collector in collectors]

    def start(self) -> None:
        """Start polling. Return after the first poll, or after FIRST_POLL if a directory does not answer."""
        super().start()
        self._has_polled.wait(FIRST_POLL)

    def scan(self) -> Scan | None:
        """Return the last scan; None if there is none or it is too long ago."""
        return self._scan if self._age() <= STALE_AFTER else None

    def poll(self) -> None:
        """Scan the ranks once and poll the collectors, one after the other while none is late.

        A collector's exception is raised when its metrics are collected.
        """
        began = self._monotonic()
        scan = self._run_directory.scan(with_steps=True)
        self._scan, self._polled_at = scan, began
        for collector in self.collectors:
            collector.poll(scan, began, POLL_TIMEOUT)

    def _age(self) -> float:
        """Return the seconds since the last poll began, or since the start."""
        return self._monotonic() - self._polled_at

    def _end(self) -> None:
        for collector in self.collectors:
            collector.end()

    def _try_to_poll(self) -> None:
        try:
            self.poll()
        finally:
            self._has_polled.set()


def _poll(collector: RankCollector, scan: Scan) -> Sequence[Metric] | Exception:
    try:
        return collector.poll(scan)
    except Exception as error:
        return error
