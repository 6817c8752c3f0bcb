"""Garbage collection is counted by generation, on any thread, and the probe can be removed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from testing.own_record import installed
from testing.waiting import in_a_thread

from rankscope import guard
from rankscope.guard import Guard
from rankscope.probes import garbage
from rankscope.probes.garbage import COLLECTIONS, SECONDS, PauseCounter
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    """Make a timeline with the probe installed and no other collections than the test's."""
    monkeypatch.setattr(guard, "reraise", True)
    gc.disable()
    timeline = Timeline(RankWriter())
    with installed(timeline, garbage):
        yield timeline
    gc.enable()


def collections(timeline: Timeline) -> list[float]:
    return list(timeline.writer.slots[COLLECTIONS : COLLECTIONS + 3].tolist())


def test_collections_are_counted_by_generation_with_their_time(timeline: Timeline) -> None:
    gc.collect(0)
    gc.collect(2)
    gc.collect(2)
    assert collections(timeline) == [1.0, 0.0, 2.0]
    seconds = timeline.writer.slots[SECONDS : SECONDS + 3].tolist()
    assert seconds[1] == 0.0
    assert 0 < seconds[0] < seconds[2]


def test_a_collection_on_another_thread_is_counted_too(timeline: Timeline) -> None:
    in_a_thread(gc.collect)
    assert collections(timeline) == [0.0, 0.0, 1.0]


def test_the_time_is_from_start_to_stop() -> None:
    times = iter([0.0, 10.0, 12.5])
    timeline = Timeline(RankWriter())
    counter = PauseCounter(timeline, Guard("garbage", lambda _: None), lambda: next(times))
    counter("start", {"generation": 1})
    counter("stop", {"generation": 1})
    assert timeline.writer.slots[SECONDS + 1] == 2.5


def test_a_collection_that_began_before_the_probe_is_not_counted() -> None:
    timeline = Timeline(RankWriter())
    PauseCounter(timeline, Guard("garbage", lambda _: None))("stop", {"generation": 2})
    assert collections(timeline) == [0.0, 0.0, 0.0]


def test_a_series_of_errors_in_the_probe_disables_it() -> None:
    def broken() -> float:
        raise RuntimeError("a bug in the probe")

    failed: list[str] = []
    counter = PauseCounter(Timeline(RankWriter()), Guard("garbage", failed.append), lambda: 0.0)
    counter._clock = broken
    for _ in range(guard.MOST_ERRORS + 1):
        counter("start", {"generation": 0})
    assert failed == ["garbage"]
