"""Simulated GPUs follow the activity of their ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rankscope.record import phases
from rankscope_exporter.simulation.machine import Activities
from rankscope_exporter.simulation.ranks import REMEMBERED, RankActivity, RankFollower, RankHistory
from rankscope_exporter.simulation.timeline import Seconds


class Ranks:
    """Activities and the time, set by a test."""

    def __init__(self, *uuids: str) -> None:
        self.now = 0.0
        self.activities: list[RankActivity] = []
        self.histories = {uuid: RankHistory() for uuid in uuids}
        self.follower = RankFollower(lambda: self.activities, self.histories, lambda: self.now)

    def poll(self, at: float, *activities: RankActivity) -> None:
        self.now, self.activities = at, list(activities)
        self.follower.poll()


@pytest.mark.parametrize(
    ("before", "after", "seconds", "pids"),
    [
        ([("A", 7, 10.0, 3.0)], [("A", 7, 10.5, 3.25)], Seconds(0.5, 0.25), (7,)),
        ([], [("A", 7, 1000.0, 0.0)], Seconds(), (7,)),
        ([("A", 7, 0.0, 0.0)], [], Seconds(), ()),
        ([("A", 7, 0.0, 0.0), ("A", 8, 5.0, 0.0)], [("A", 7, 0.25, 0.0), ("A", 8, 5.5, 0.0)], Seconds(0.75), (7, 8)),
        ([("A", 7, 5.0, 5.0)], [("A", 7, 1.0, 6.0)], Seconds(0.0, 1.0), (7,)),
        ([("B", 7, 0.0, 0.0)], [("B", 7, 1.0, 0.0)], Seconds(), ()),
    ],
    ids=["one rank", "first seen", "ended", "two ranks", "a counter that decreases", "a rank on another GPU"],
)
def test_the_activity_of_a_gpus_ranks_between_two_polls_is_added_to_it(before, after, seconds, pids):
    ranks = Ranks("A")
    ranks.poll(1, *(RankActivity(*one) for one in before))
    ranks.poll(2, *(RankActivity(*one) for one in after))
    assert (ranks.histories["A"].seconds(2), ranks.histories["A"].pids) == (seconds, pids)


def test_activity_between_two_polls_is_interpolated_linearly():
    history = RankHistory()
    history.add(1.0, Seconds(computing=0.0), ())
    history.add(3.0, Seconds(computing=1.0, waiting=0.5), ())
    assert history.seconds(2.0) == Seconds(0.5, 0.25)
    assert history.seconds(-1.0) == Seconds()
    assert history.seconds(99.0) == history.seconds(3.0) == Seconds(1.0, 0.5)
    assert history.known_until == 3.0


def test_the_memory_of_a_history_is_bounded():
    history = RankHistory()
    for second in range(1, 1000):
        history.add(float(second), Seconds(computing=1.0), ())
    assert history.seconds(999.0).computing == 999
    assert history.seconds(0.0).computing >= 999 - REMEMBERED - 1, "earlier time is still included in the sum"


def test_unreadable_ranks_do_not_end_the_thread(caplog):
    called_again = threading.Event()
    calls = iter((lambda: None, called_again.set))

    def broken():
        next(calls, called_again.set)()
        raise OSError("no such directory")

    follower = RankFollower(broken, {}, lambda: 0.0)
    follower.start()
    assert called_again.wait(30)
    follower.stop()
    assert "following the ranks failed" in caplog.text


def computing(seconds: float, on_device: float, dry: float) -> Any:
    """Return a run directory whose rank has computed for these seconds, by its host and by its device."""
    host = {**dict.fromkeys(phases.NAMES, 0.0), "forward": seconds}
    device, drained = ({"forward": spent} if on_device else {} for spent in (on_device, dry))
    snapshot = SimpleNamespace(
        alive=True, info={"uuid": "A", "pid": 7}, phase_seconds=host, device_seconds=device, device_dry_seconds=drained
    )
    return SimpleNamespace(scan=lambda: SimpleNamespace(ranks=[SimpleNamespace(snapshot=snapshot)]))


@pytest.mark.parametrize(("on_device", "dry", "busy"), [(0.0, 0.0, 10.0), (2.0, 0.5, 7.5), (2.0, 2.0, 1.0)])
def test_no_kernel_runs_while_the_ranks_device_is_dry(on_device, dry, busy):
    activities = Activities(computing(0.0, 0.0, 0.0))
    list(activities())
    activities._run_directory = cast("Any", computing(10.0, on_device, dry))
    assert [one.busy_seconds for one in activities()] == [pytest.approx(busy)]
