"""Simulated GPUs that follow their ranks: a thread polls the ranks' activity and records it by GPU."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankscope_exporter.simulation.timeline import Seconds
from rankscope_exporter.worker import Worker

POLL_INTERVAL = 1 / 6  # seconds: one poll per sample of the ring
MAX_POLL_SHARE = 1 / 10  # of the time: reading hundreds of ranks at full rate would dominate the exporter's work
REMEMBERED = 180  # polls: 30 s, longer than the ring and the temperature window


@dataclass(frozen=True)
class RankActivity:
    """Cumulative activity of one rank on its GPU, including its open phase."""

    uuid: str
    """UUID of its GPU."""
    pid: int
    busy_seconds: float
    """Computing time."""
    waiting_seconds: float
    """Time in collectives."""


class RankHistory:
    """Cumulative computing and waiting time of one GPU's ranks at recent polls, and their process ids."""

    def __init__(self, share: Callable[[float], float] = lambda _: 1.0) -> None:
        """Start a history at 0. `share` returns the share of a rank's time in which a kernel runs, by time."""
        self._share = share
        # The polling thread replaces the whole tuple, so readers need no lock.
        self._points: tuple[tuple[float, Seconds], ...] = ((0.0, Seconds()),)
        self.pids: tuple[int, ...] = ()

    @property
    def known_until(self) -> float:
        """Time of the last poll. Later activity is unknown."""
        return self._points[-1][0]

    def add(self, t: float, spent: Seconds, pids: tuple[int, ...]) -> None:
        """Add the time spent since the previous poll."""
        share = self._share(t)
        spent = Seconds(spent.computing * share, spent.waiting * share)
        self._points = (*self._points[-REMEMBERED:], (t, self._points[-1][1] + spent))
        self.pids = pids

    def seconds(self, t: float) -> Seconds:
        """Return the utilized time until `t`: linear between two polls, constant outside them."""
        points = self._points
        index = bisect_right(points, t, key=lambda point: point[0])
        if index in (0, len(points)):
            return points[min(index, len(points) - 1)][1]
        (start, before), (end, after) = points[index - 1], points[index]
        share, spent = (t - start) / (end - start), after - before
        return before + Seconds(spent.computing * share, spent.waiting * share)


class RankFollower(Worker):
    """A thread that polls the ranks and adds their activity since the last poll to their GPUs."""

    def __init__(
        self,
        activities: Callable[[], Iterable[RankActivity]],
        histories: Mapping[str, RankHistory],
        now: Callable[[], float],
    ) -> None:
        complaint = "following the ranks failed"
        super().__init__("simulated-ranks", POLL_INTERVAL, self._poll_if_due, complaint)
        self._activities = activities
        self._histories = histories
        self._now = now
        self._last: dict[tuple[str, int], RankActivity] = {}
        self._next_poll = 0.0

    def _poll_if_due(self) -> None:
        began = time.monotonic()
        if began >= self._next_poll:
            self.poll()
            self._next_poll = began + (time.monotonic() - began) / MAX_POLL_SHARE

    def poll(self) -> None:
        """Poll all ranks once. A new rank's earlier activity does not count."""
        now = self._now()
        seen = {(activity.uuid, activity.pid): activity for activity in self._activities()}
        for uuid, history in self._histories.items():
            ranks = [(key, activity) for key, activity in seen.items() if key[0] == uuid]
            spent = sum((_since(self._last.get(key, activity), activity) for key, activity in ranks), Seconds())
            history.add(now, spent, tuple(activity.pid for _, activity in ranks))
        self._last = seen


def _since(before: RankActivity, now: RankActivity) -> Seconds:
    computing = max(0.0, now.busy_seconds - before.busy_seconds)
    return Seconds(computing, max(0.0, now.waiting_seconds - before.waiting_seconds))
