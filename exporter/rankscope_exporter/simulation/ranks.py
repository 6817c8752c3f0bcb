"""Simulated GPUs follow the ranks that run on them: a thread polls what each rank did and remembers it by GPU."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankscope_exporter.simulation.timeline import Seconds
from rankscope_exporter.worker import Worker

POLLED_EVERY = 1 / 6  # seconds: once for each sample of the ring
AT_MOST = 1 / 10  # of the time: to read hundreds of ranks so often would be most of what the exporter does
REMEMBERED = 180  # polls: 30 s, more than the ring and the temperature look back


@dataclass(frozen=True)
class RankActivity:
    """What one rank has done on its GPU since it began, the phase that is still open included."""

    uuid: str
    """Of its GPU."""
    pid: int
    busy_seconds: float
    """Time in which it computed."""
    waiting_seconds: float
    """Time that it sat in a collective."""


class RankHistory:
    """How long the ranks of one GPU had computed and waited at each of the last polls, and who they are."""

    def __init__(self, start: float, share: Callable[[float], float] = lambda _: 1.0) -> None:
        """`share` is that of a rank's time in which a kernel runs, by the time."""
        self._share = share
        # Replaced as a whole by the polling thread, so that its readers need no lock.
        self._points: tuple[tuple[float, Seconds], ...] = ((start, Seconds()),)
        self.pids: tuple[int, ...] = ()

    @property
    def known_until(self) -> float:
        """The time of the last poll: nothing later is known yet."""
        return self._points[-1][0]

    def add(self, t: float, spent: Seconds, pids: tuple[int, ...]) -> None:
        """What was spent since the poll before."""
        share = self._share(t)
        spent = Seconds(spent.computing * share, spent.waiting * share)
        self._points = (*self._points[-REMEMBERED:], (t, self._points[-1][1] + spent))
        self.pids = pids

    def seconds(self, t: float) -> Seconds:
        """Utilized time until `t`, as a straight line between two polls and constant outside of them."""
        points = self._points
        index = bisect_right(points, t, key=lambda point: point[0])
        if index in (0, len(points)):
            return points[min(index, len(points) - 1)][1]
        (start, before), (end, after) = points[index - 1], points[index]
        share, spent = (t - start) / (end - start), after - before
        return before + Seconds(spent.computing * share, spent.waiting * share)


class RankFollower(Worker):
    """Polls the ranks and divides what they did since the last poll among the GPUs."""

    def __init__(
        self,
        activities: Callable[[], Iterable[RankActivity]],
        histories: Mapping[str, RankHistory],
        now: Callable[[], float],
    ) -> None:
        complaint = "the simulated GPUs cannot follow the ranks"
        super().__init__("simulated-ranks", POLLED_EVERY, self._poll_or_rest, complaint)
        self._activities = activities
        self._histories = histories
        self._now = now
        self._last: dict[tuple[str, int], RankActivity] = {}
        self._rests_until = 0.0

    def _poll_or_rest(self) -> None:
        began = time.monotonic()
        if began >= self._rests_until:
            self.poll()
            self._rests_until = began + (time.monotonic() - began) / AT_MOST

    def poll(self) -> None:
        """One look at all ranks. A rank that is new counts from now on."""
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
