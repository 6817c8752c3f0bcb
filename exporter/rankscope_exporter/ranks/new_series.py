"""How many series an owner may add in an hour. Each name in a record is new series, which Prometheus keeps for hours.

A new run each second, within all other limits, was 1,000 to 1,700 new series a second, and the rules took twice their
interval. An owner may add BURST series at once, and SERIES_AN_HOUR in the long run: 430 ranks at once, and 1,300 an
hour. At once there may be the 128 ranks of one owner that a page shows, after a restart of the exporter. In an hour
there may be a sweep of some hundred short runs of several ranks each. A name that was shown within the last hour adds
nothing: a job that is started again has the same names but for its pid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

from rankscope.record.layout import OPS
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.share import BARE_SERIES, SERIES_OF_GROUP, SERIES_OF_OP, SERIES_OF_PHASE

BURST = 100_000
SERIES_AN_HOUR = 300_000
HOUR = 3600.0  # seconds
NAMES_REMEMBERED = 65_536  # six times as many as a page can have: 8 MB
OWNERS_REMEMBERED = 4096
SERIES_OF_RANK = BARE_SERIES + SERIES_OF_OP * len(OPS)


class NewSeries:
    """What each owner may still add. What is forgotten because it is too much counts as new again."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._shown: dict[int, float] = {}  # when each name was shown last, by its hash; in the order of these times
        self._left: dict[int, tuple[float, float]] = {}  # of each owner: series, and when that was

    def admits(self, rank: Rank) -> bool:
        """Return whether the rank may be shown, and if so take what it adds from what its owner has left."""
        now, names = self._monotonic(), dict(_names(rank))
        added = sum(series for name, series in names.items() if name not in self._shown)
        if added and not self._take(rank.owner, added, now):
            return False
        for name in names:
            self._shown.pop(name, None)
            self._shown[name] = now
        return True

    def forget(self) -> None:
        """Forget the names that nobody has shown for an hour, and what is too much to remember."""
        now = self._monotonic()
        while self._shown and now - next(iter(self._shown.values())) > HOUR:
            del self._shown[next(iter(self._shown))]
        for name in [*islice(self._shown, max(0, len(self._shown) - NAMES_REMEMBERED))]:
            del self._shown[name]
        for owner in [*islice(self._left, max(0, len(self._left) - OWNERS_REMEMBERED))]:
            del self._left[owner]

    def _take(self, owner: int, series: int, now: float) -> bool:
        left, since = self._left.get(owner, (BURST, now))
        left = min(BURST, left + (now - since) * SERIES_AN_HOUR / HOUR)
        if series > left:
            return False
        self._left.pop(owner, None)  # the last to be forgotten
        self._left[owner] = left - series, now
        return True


def _names(rank: Rank) -> Iterator[tuple[int, int]]:
    """The hash of each name that becomes a label of the rank's, and the series that come with it at most."""
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
