"""The thread that looks at all ranks once a second, for what a scrape is too seldom or too short for.

A scrape takes what it has found last: to compare the steps of eight ranks, or to read procfs for them and their loader
workers, would cost it milliseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from rankscope_exporter.run_directory import Rank, RunDirectory

INTERVAL = 1.0  # seconds: a ring holds 128 steps, and only jobs with more than that in a second lose some

logger = logging.getLogger(__name__)


class RankSource(Protocol):
    """What looks at the ranks."""

    name: str
    help: str

    def look(self, ranks: Sequence[Rank]) -> list[Metric]:
        """Its metrics now."""


class WatchedCollector:
    """A source as a collector."""

    def __init__(self, source: RankSource) -> None:
        self.name = source.name
        self.help = source.help
        self._source = source
        self._latest: list[Metric] | Exception = []

    def look(self, ranks: Sequence[Rank]) -> None:
        """Have the source look. A mistake in it costs the others nothing: the next scrape raises it."""
        try:
            self._latest = self._source.look(ranks)
        except Exception as error:
            self._latest = error

    def collect(self) -> Iterable[Metric]:
        """What was found last."""
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest


class RankWatcher:
    """Shows the ranks to every source, again and again."""

    def __init__(self, run_directory: RunDirectory, sources: Iterable[RankSource], interval: float = INTERVAL) -> None:
        self.collectors = [WatchedCollector(source) for source in sources]
        self._run_directory = run_directory
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            try:
                ranks = self._run_directory.scan(with_steps=True).ranks
            except Exception:  # the last resort: without this thread nobody would look again
                logger.exception("the run directories cannot be read")
                ranks = ()
            for collector in self.collectors:
                collector.look(ranks)
            if self._stop.wait(self._interval):
                return
