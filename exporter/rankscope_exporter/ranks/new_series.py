"""The limit of new series per owner and hour. Each new name in a record creates series that Prometheus keeps for hours.

A new run each second, within all other limits, created 1,000 to 1,700 new series per second, and the rules took twice
their interval. An owner may add BURST series at once and SERIES_PER_HOUR on average: 430 ranks at once, and 1,300 per
hour. After a restart of the exporter, the 128 ranks of one owner that a page shows are new at once; a sweep may have
some hundred short runs of several ranks in an hour. A name that was shown within the last hour adds nothing: a
restarted job has the same names except for its pid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

from rankscope.record.layout import OPS
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.principals import principal
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.share import BARE_SERIES, SERIES_OF_GROUP, SERIES_OF_OP, SERIES_OF_PHASE

BURST = 100_000
SERIES_PER_HOUR = 300_000
HOUR = 3600.0  # seconds
NAMES_REMEMBERED = 32_768  # three times as many as on a page: 4 MB
OWNERS_REMEMBERED = 4096
SERIES_OF_RANK = BARE_SERIES + SERIES_OF_OP * len(OPS)


class NewSeries:
    """The series that each owner may still add. Names that are forgotten because of a limit count as new again."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._shown: dict[int, float] = {}  # when each name was shown last, by its hash, ordered by time
        self._left: dict[int, tuple[float, float]] = {}  # remaining series of each owner, and the time

    def admits(self, rank: Rank) -> bool:
        """Return whether the rank may be shown. If so, subtract its new series from its owner's remaining ones."""
        now, names = self._monotonic(), dict(_names(rank))
        added = sum(series for name, series in names.items() if name not in self._shown)
        if added and not self._take(principal(rank.owner), added, now):
            return False
        for name in names:
            self._shown.pop(name, None)
            self._shown[name] = now
        return True

    def forget(self) -> None:
        """Forget names that were not shown for an hour, and the oldest names and owners beyond the limits."""
        now = self._monotonic()
        while self._shown and now - next(iter(self._shown.values())) > HOUR:
            del self._shown[next(iter(self._shown))]
        for name in [*islice(self._shown, max(0, len(self._shown) - NAMES_REMEMBERED))]:
            del self._shown[name]
        for owner in [*islice(self._left, max(0, len(self._left) - OWNERS_REMEMBERED))]:
            del self._left[owner]

    def _take(self, owner: int, series: int, now: float) -> bool:
        left, since = self._left.get(owner, (BURST, now))
        left = min(BURST, left + (now - since) * SERIES_PER_HOUR / HOUR)
        if series > left:
            return False
        self._left.pop(owner, None)  # move the owner to the end of the order
        self._left[owner] = left - series, now
        return True


def _names(rank: Rank) -> Iterator[tuple[int, int]]:
    """Yield the hash of each name in the rank's labels, and the most series that it creates."""
    key, info = rank.key, rank.snapshot.info
    yield hash(key), SERIES_OF_RANK
    yield hash((key, "info", *(info[label] for label in LABELS))), 1
    yield hash((key, "settings", *sorted(info.get("settings", {}).items()))), 1
    yield hash((key, "slurm", *sorted(info.get("slurm", {}).items()))), 1
    yield hash((key, "labels", *sorted(info.get("labels", {}).items()))), 1
    yield hash((key, "layout", *info.get("group_descriptions", ()), *info.get("pairwise", ()))), 1
    for tracker, identifier in info.get("tracker_ids", {}).items():
        yield hash((key, "tracker", tracker, identifier, info.get("tracker_urls", {}).get(tracker))), 1
    for phase in info.get("phases", ()):
        yield hash((key, "phase", phase)), SERIES_OF_PHASE
    for group in rank.snapshot.groups:
        yield hash((key, "group", group)), SERIES_OF_GROUP
