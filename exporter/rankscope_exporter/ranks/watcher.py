"""The thread that reads all ranks once a second and has them written, so that a scrape only takes what is there.

To read eight ranks' records, compare their steps and look at their processes and loader workers would cost a scrape
milliseconds, and a file system that hangs would hold it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.periodic import Periodic
from rankscope_exporter.ranks.run_directory import RunDirectory, Scan

INTERVAL = 1.0  # seconds: a ring holds 128 steps, and only jobs with more than that in a second lose some
LONGEST_AGE = 5.0  # seconds, as of GPUs' readings: what was read before that is none
FIRST_LOOK = 1.0  # seconds that the start waits for it


class OutdatedError(Exception):
    """The ranks have not been read for too long: a run directory that hangs, or more work than a second has."""


class RankSource(Protocol):
    """What looks at the ranks."""

    name: str
    help: str

    def look(self, scan: Scan) -> Sequence[Metric]:
        """Its metrics now."""


class WatchedCollector:
    """A source as a collector. `age` is that of the last look, in seconds."""

    def __init__(self, source: RankSource, age: Callable[[], float]) -> None:
        self.name = source.name
        self.help = source.help
        self._source = source
        self._age = age
        self._latest: Sequence[Metric] | Exception = OutdatedError("the run directories have not been read yet")

    def look(self, scan: Scan) -> None:
        """Have the source look. A mistake in it costs the others nothing: the next scrape raises it."""
        try:
            self._latest = self._source.look(scan)
        except Exception as error:
            self._latest = error

    def collect(self) -> Iterable[Metric]:
        """What was found last. Raises OutdatedError if that was too long ago."""
        age = self._age()
        if age > LONGEST_AGE:
            raise OutdatedError(f"the run directories were last read {age:.0f} s ago")
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest


class RankWatcher:
    """Shows the ranks to every source, again and again."""

    def __init__(
        self,
        run_directory: RunDirectory,
        sources: Iterable[RankSource],
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.collectors = [WatchedCollector(source, self._age) for source in sources]
        self._run_directory = run_directory
        self._monotonic = monotonic
        self._scan: Scan | None = None
        self._looked_at = monotonic()
        self._has_looked = threading.Event()
        self._thread = Periodic("ranks", interval, self._try_to_look, "the run directories cannot be read")

    def start(self) -> None:
        """Begin to look; returns after the first time, or soon after where a directory does not answer."""
        self._thread.start()
        self._has_looked.wait(FIRST_LOOK)

    def stop(self) -> None:
        """End the thread, unless a directory does not answer: then it ends with the process."""
        self._thread.stop()

    def scan(self) -> Scan | None:
        """What was read last; None if that was too long ago or never."""
        return self._scan if self._age() <= LONGEST_AGE else None

    def look(self) -> None:
        """Read the ranks once, and have every source look at them."""
        began = self._monotonic()
        scan = self._run_directory.scan(with_steps=True)
        for collector in self.collectors:
            collector.look(scan)
        self._scan, self._looked_at = scan, began

    def _age(self) -> float:
        return self._monotonic() - self._looked_at

    def _try_to_look(self) -> None:
        try:
            self.look()
        finally:
            self._has_looked.set()
