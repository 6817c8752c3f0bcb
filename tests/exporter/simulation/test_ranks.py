"""Simulated GPUs do what the ranks on them do."""

from __future__ import annotations

import threading

import pytest

from rankscope_exporter.simulation.ranks import REMEMBERED, RankActivity, RankFollower, RankHistory
from rankscope_exporter.simulation.timeline import Seconds


class Ranks:
    """Activities that a test sets, and the time."""

    def __init__(self, *uuids: str) -> None:
        self.now = 0.0
        self.activities: list[RankActivity] = []
        self.histories = {uuid: RankHistory(0.0) for uuid in uuids}
        self.follower = RankFollower(lambda: self.activities, self.histories, lambda: self.now)

    def poll(self, at: float, *activities: RankActivity) -> None:
        self.now, self.activities = at, list(activities)
        self.follower.poll()


def test_what_a_rank_did_between_two_polls_is_its_gpus_work():
    ranks = Ranks("A", "B")
    ranks.poll(1, RankActivity("A", 7, 10.0, 3.0))
    ranks.poll(2, RankActivity("A", 7, 10.5, 3.25))
    assert ranks.histories["A"].seconds(2) == Seconds(0.5, 0.25)
    assert ranks.histories["A"].pids == (7,)
    assert ranks.histories["B"].seconds(2) == Seconds()
    assert ranks.histories["B"].pids == ()


def test_what_a_rank_did_before_it_was_seen_is_not_counted():
    ranks = Ranks("A")
    ranks.poll(1, RankActivity("A", 7, 1000.0, 0.0))
    assert ranks.histories["A"].seconds(1) == Seconds()


def test_between_two_polls_the_work_is_spread_evenly():
    history = RankHistory(0.0)
    history.add(1.0, Seconds(computing=0.0), ())
    history.add(3.0, Seconds(computing=1.0, waiting=0.5), ())
    assert history.seconds(2.0) == Seconds(0.5, 0.25)
    assert history.seconds(-1.0) == Seconds()
    assert history.seconds(99.0) == history.seconds(3.0) == Seconds(1.0, 0.5)
    assert history.known_until == 3.0


def test_a_rank_that_ended_leaves_its_gpu_idle_and_without_a_process():
    ranks = Ranks("A")
    ranks.poll(1, RankActivity("A", 7, 0.0, 0.0))
    ranks.poll(2, RankActivity("A", 7, 1.0, 0.0))
    ranks.poll(3)
    ranks.poll(4)
    assert ranks.histories["A"].seconds(4) == Seconds(1.0, 0.0)
    assert ranks.histories["A"].pids == ()


def test_two_ranks_on_one_gpu_add_up():
    ranks = Ranks("A")
    ranks.poll(1, RankActivity("A", 7, 0.0, 0.0), RankActivity("A", 8, 5.0, 0.0))
    ranks.poll(2, RankActivity("A", 7, 0.25, 0.0), RankActivity("A", 8, 5.5, 0.0))
    assert ranks.histories["A"].seconds(2).computing == pytest.approx(0.75)


def test_a_counter_that_went_back_takes_nothing_away():
    ranks = Ranks("A")
    ranks.poll(1, RankActivity("A", 7, 5.0, 5.0))
    ranks.poll(2, RankActivity("A", 7, 1.0, 6.0))
    assert ranks.histories["A"].seconds(2) == Seconds(0.0, 1.0)


def test_a_rank_on_no_simulated_gpu_is_nobodys_work():
    ranks = Ranks("A")
    ranks.poll(1, RankActivity("elsewhere", 7, 0.0, 0.0))
    ranks.poll(2, RankActivity("elsewhere", 7, 1.0, 0.0))
    assert ranks.histories["A"].seconds(2) == Seconds()


def test_a_long_job_takes_no_more_memory_than_a_short_one():
    history = RankHistory(0.0)
    for second in range(1, 1000):
        history.add(float(second), Seconds(computing=1.0), ())
    assert history.seconds(999.0).computing == 999
    assert history.seconds(0.0).computing >= 999 - REMEMBERED - 1, "what is forgotten is constant, not lost"


def test_ranks_that_cannot_be_read_do_not_end_the_thread(caplog):
    called_again = threading.Event()
    calls = iter((lambda: None, called_again.set))

    def broken():
        next(calls, called_again.set)()
        raise OSError("no such directory")

    follower = RankFollower(broken, {}, lambda: 0.0)
    follower.start()
    assert called_again.wait(30)
    follower.stop()
    assert "cannot follow the ranks" in caplog.text
