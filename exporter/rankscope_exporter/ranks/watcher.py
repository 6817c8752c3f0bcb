"""The thread that polls all ranks once a second and has them written, so that a scrape only takes what is there.

To read eight ranks' records, compare their steps and look at their processes and loader workers would cost a scrape
milliseconds, and a file system that hangs would hold it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.worker import Worker

INTERVAL = 1.0  # seconds: a ring holds 128 steps, and only jobs with more than that in a second lose some
STALE_AFTER = 5.0  # seconds, as of GPUs' readings: what was read before that is none
FIRST_POLL = 1.0  # seconds that the start waits for it


class OutdatedError(Exception):
    """The ranks have not been read for too long: a run directory that hangs, or more work than a second has."""


class RankCollector(Protocol):
    """What is polled once a second. What it raises costs only its own metrics."""

    @property
    def name(self) -> str:
        """The value of the label `collector`."""

    def poll(self, scan: Scan) -> Sequence[Metric]:
        """Its metrics of the ranks that were found now."""


class PolledCollector:
    """A collector of ranks as a scrape asks it: takes what the last poll brought."""

    def __init__(self, name: str, latest: Callable[[str], Sequence[Metric]]) -> None:
        self.name = name
        self._latest = latest

    def collect(self) -> Sequence[Metric]:
        """What was found last. Raises what the poll raised, and OutdatedError if it was too long ago."""
        return self._latest(self.name)


class RankWatcher(Worker):
    """Shows the ranks to every collector, again and again."""

    def __init__(
        self,
        run_directory: RunDirectory,
        collectors: Iterable[RankCollector],
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("ranks", interval, self._try_to_poll, "the run directories cannot be read")
        self._collectors = list(collectors)
        self._run_directory = run_directory
        self._monotonic = monotonic
        self._scan: Scan | None = None
        self._latest: dict[str, Sequence[Metric] | Exception] = {}
        self._polled_at = monotonic()
        self._has_polled = threading.Event()
        self.collectors = [PolledCollector(collector.name, self._collect) for collector in self._collectors]

    def start(self) -> None:
        """Begin to poll; returns after the first time, or soon after where a directory does not answer."""
        super().start()
        self._has_polled.wait(FIRST_POLL)

    def scan(self) -> Scan | None:
        """What was read last; None if that was too long ago or never."""
        return self._scan if self._age() <= STALE_AFTER else None

    def poll(self) -> None:
        """Read the ranks once, and poll every collector. A mistake in one is raised to whoever asks for its metrics."""
        began = self._monotonic()
        scan = self._run_directory.scan(with_steps=True)
        for collector in self._collectors:
            self._latest[collector.name] = _polled(collector, scan)
        self._scan, self._polled_at = scan, began

    def _collect(self, name: str) -> Sequence[Metric]:
        age = self._age()
        if age > STALE_AFTER:
            raise OutdatedError(f"the run directories were last read {age:.0f} s ago")
        if name not in self._latest:
            raise OutdatedError("the run directories have not been read yet")
        latest = self._latest[name]
        if isinstance(latest, Exception):
            raise latest
        return latest

    def _age(self) -> float:
        """Seconds since the last poll began, or since the start."""
        return self._monotonic() - self._polled_at

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
