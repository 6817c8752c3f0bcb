"""The thread that polls the ranks: hanging directories, failing or late collectors, and the metrics of a scrape."""

from __future__ import annotations

from collections import Counter
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
from testing.clock import Clock
from testing.waiting import eventually

from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.ranks import watcher as watcher_module
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.watcher import OutdatedError, RankWatcher

COUNT = Declaration("gauge", "polls", "How often it was polled.")


class Counting:
    name = "counting"

    def __init__(self) -> None:
        self.polls = 0

    def poll(self, _: Scan):
        self.polls += 1
        return [COUNT.family(self.polls)]


class Failing(Counting):
    name = "failing"

    def poll(self, _: Scan):
        raise ValueError("a mistake")


class Late(Counting):
    """A collector that takes as long as the test lets it."""

    name = "late"

    def __init__(self) -> None:
        super().__init__()
        self.may_end = Event()

    def poll(self, scan: Scan):
        assert self.may_end.wait(60)
        return super().poll(scan)


class Directory:
    """A run directory that answers until the test lets it hang."""

    def __init__(self) -> None:
        self.answers = Event()
        self.answers.set()

    def scan(self, **_: object) -> Scan:
        assert self.answers.wait(60)
        return Scan((), Counter())


def test_a_failing_collector_does_not_affect_others():
    watcher = RankWatcher(Directory(), [Failing(), Counting()])
    watcher.poll()
    failing, counting = watcher.collectors
    with pytest.raises(ValueError, match="a mistake"):
        failing.collect()
    assert [family.text for family in counting.collect()] == [b"polls 1.0\n"]


def test_a_late_collector_loses_only_its_own_series(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watcher_module, "POLL_TIMEOUT", 0.05)
    clock, slow = Clock(100.0), Late()
    watcher = RankWatcher(Directory(), [slow, Counting()], monotonic=clock)
    late, counting = watcher.collectors
    for _ in range(30):
        watcher.poll()
        eventually(lambda: _has_result(counting))
        clock.now += 1
    with pytest.raises(OutdatedError):
        late.collect()
    slow.may_end.set()
    eventually(lambda: slow.polls == 1)
    with pytest.raises(OutdatedError, match="takes too long; the last result is 30 s old"):
        late.collect()
    eventually(lambda: _polls_again(watcher, late))


def _polls_again(watcher: RankWatcher, collector) -> bool:
    watcher.poll()
    return _has_result(collector)


def test_the_threads_of_the_collectors_end_with_the_watcher():
    before = set(enumerate_threads())
    watcher = RankWatcher(Directory(), [Counting()], interval=0.01)
    watcher.start()
    assert {thread.name for thread in set(enumerate_threads()) - before} == {"ranks", "ranks-counting"}
    watcher.stop()
    eventually(lambda: set(enumerate_threads()) <= before)


def test_the_start_waits_for_the_first_poll():
    watcher = RankWatcher(Directory(), [Counting()], interval=60)
    watcher.start()
    assert [family.text for family in watcher.collectors[0].collect()] == [b"polls 1.0\n"]
    watcher.stop()


def test_collecting_before_the_first_poll_is_an_error():
    (collector,) = RankWatcher(Directory(), [Counting()]).collectors
    with pytest.raises(OutdatedError, match="not been read yet"):
        collector.collect()


def test_ranks_of_a_hanging_directory_are_absent_until_it_answers_again():
    clock, directory = Clock(100.0), Directory()
    watcher = RankWatcher(directory, [Counting()], interval=0.01, monotonic=clock)
    (collector,) = watcher.collectors
    watcher.start()
    directory.answers.clear()
    clock.now += 4
    assert list(collector.collect())
    assert watcher.scan() is not None
    clock.now += 2
    assert watcher.scan() is None
    with pytest.raises(OutdatedError, match="last read 6 s ago"):
        collector.collect()
    directory.answers.set()
    eventually(lambda: _has_result(collector))
    watcher.stop()


def _has_result(collector) -> bool:
    try:
        return bool(collector.collect())
    except OutdatedError:
        return False
