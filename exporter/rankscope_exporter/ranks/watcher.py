"""The thread that polls all ranks once a second and has them written, so that a scrape only takes what is there.

To read eight ranks' records, compare their steps and look at their processes and loader workers would cost a scrape
milliseconds, and a file system that hangs would hold it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from prometheus_client.core import Metric

from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.worker import Worker

INTERVAL = 1.0  # seconds: a ring holds 128 steps, and only jobs with more than that in a second lose some
STALE_AFTER = 5.0  # seconds, as of GPUs' readings: what was read before that is none
FIRST_POLL = 1.0  # seconds that the start waits for it
PATIENCE = 1.0  # seconds that the next collector waits for one that is late: then they poll side by side


class OutdatedError(Exception):
    """The ranks have not been read for too long: a run directory that hangs, or more work than a second has."""


class RankCollector(Protocol):
    """What is polled once a second. If it raises or is late, only its own metrics are absent."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""

    def poll(self, scan: Scan) -> Sequence[Metric]:
        """Its metrics of the ranks that were found now."""


@runtime_checkable
class Closing(Protocol):
    """A collector that has something to do when the exporter ends in order."""

    def close(self) -> None:
        """Save what it has."""


class PolledCollector:
    """A collector of ranks, which polls in a thread of its own, and what a scrape gets: what the last poll brought."""

    def __init__(self, collector: RankCollector, age: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """`age` returns the seconds since the ranks were last read."""
        self.name = collector.name
        self.collector = collector
        self._age = age
        self._monotonic = monotonic
        self._latest: tuple[float, Sequence[Metric] | Exception] | None = None
        self._scans = SimpleQueue[tuple[float, Scan] | None]()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread = threading.Thread(target=self._run, name=f"ranks-{self.name}", daemon=True)

    def poll(self, scan: Scan, read_at: float, patience: float) -> None:
        """Poll the collector, and wait so many seconds for that. One that is at an earlier scan misses this one."""
        if not self._is_idle.is_set():
            return
        if self._thread.ident is None:
            self._thread.start()
        self._is_idle.clear()
        self._scans.put((read_at, scan))
        self._is_idle.wait(patience)

    def end(self) -> None:
        """End the thread, and wait for that as long as for a poll."""
        self._scans.put(None)
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def collect(self) -> Sequence[Metric]:
        """Return what was found last.

        Raises what the poll raised, and OutdatedError if the ranks were read, or the collector polled, too long ago.
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
            self._latest = read_at, _polled(self.collector, scan)
            self._is_idle.set()
        if isinstance(self.collector, Closing):
            self.collector.close()


class RankWatcher(Worker):
    """Shows the ranks to every collector, again and again."""

    def __init__(
        self,
        run_directory: RunDirectory,
        collectors: Iterable[RankCollector],
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("ranks", interval, self._try_to_poll, "the run directories cannot be read", self._end)
        self._run_directory = run_directory
        self._monotonic = monotonic
        self._scan: Scan | None = None
        self._polled_at = monotonic()
        self._has_polled = threading.Event()
        self.collectors = [PolledCollector(collector, self._age, monotonic) for collector in collectors]

    def start(self) -> None:
        """Begin to poll; returns after the first time, or soon after where a directory does not answer."""
        super().start()
        self._has_polled.wait(FIRST_POLL)

    def scan(self) -> Scan | None:
        """What was read last; None if that was too long ago or never."""
        return self._scan if self._age() <= STALE_AFTER else None

    def poll(self) -> None:
        """Read the ranks once, and poll every collector, one after the other while none is late.

        A mistake in one is raised to whoever asks for its metrics.
        """
        began = self._monotonic()
        scan = self._run_directory.scan(with_steps=True)
        self._scan, self._polled_at = scan, began
        for collector in self.collectors:
            collector.poll(scan, began, PATIENCE)

    def _age(self) -> float:
        """Seconds since the last poll began, or since the start."""
        return self._monotonic() - self._polled_at

    def _end(self) -> None:
        for collector in self.collectors:
            collector.end()

    def _try_to_poll(self) -> None:
        try:
            self.poll()
        finally:
            self._has_polled.set()


def _polled(collector: RankCollector, scan: Scan) -> Sequence[Metric] | Exception:
    try:
        return collector.poll(scan)
    except Exception as error:
        return error
