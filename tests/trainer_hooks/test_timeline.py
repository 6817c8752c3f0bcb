"""Phases partition the time; steps and start-up are counted as the metrics' documentation says."""

from __future__ import annotations

import threading

import pytest

from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.record import PLACES
from rankscope.timeline import Timeline


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    timeline = Timeline(RankWriter(), clock)
    timeline.step()  # ends start-up
    return timeline


def seconds(timeline: Timeline) -> dict[str, float]:
    """Closed phases that have any time."""
    values = timeline.writer.slots[PLACES["phase_seconds"] : PLACES["phase_seconds"] + len(record.PHASES)].tolist()
    return {name: value for name, value in zip(record.PHASES, values, strict=True) if value}


def test_the_innermost_phase_gets_the_time(timeline: Timeline, clock: Clock) -> None:
    backward = timeline.enter(record.BACKWARD)
    clock.now += 2
    wait = timeline.enter(record.COLLECTIVE_WAIT)
    clock.now += 3
    timeline.leave(wait)
    clock.now += 1
    timeline.leave(backward)
    assert seconds(timeline) == {"backward": 3.0, "collective_wait": 3.0}


@pytest.mark.parametrize("absorbing", [record.EVALUATION, record.CHECKPOINT])
def test_evaluation_and_checkpoint_absorb_what_they_contain(timeline: Timeline, clock: Clock, absorbing: int) -> None:
    outer = timeline.enter(absorbing)
    clock.now += 1
    inner = timeline.enter(record.DATA_WAIT)
    clock.now += 2
    timeline.leave(inner)
    timeline.leave(outer)
    assert seconds(timeline) == {record.PHASES[absorbing]: 3.0}


def test_start_up_absorbs_everything_up_to_the_end_of_the_first_step(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    clock.now += 4
    forward = timeline.enter(record.FORWARD)
    clock.now += 5
    timeline.leave(forward)
    timeline.step()
    clock.now += 1
    timeline.leave(timeline.enter(record.FORWARD))
    assert seconds(timeline) == {"startup": 9.0, "other": 1.0}


def test_a_phase_open_across_the_end_of_start_up_still_closes_in_its_place(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    epoch = timeline.enter(record.FORWARD)
    timeline.step()
    clock.now += 1
    timeline.leave(epoch)
    clock.now += 2
    timeline.leave(timeline.enter(record.BACKWARD))
    assert seconds(timeline) == {"forward": 1.0, "other": 2.0}


def test_leaving_an_outer_phase_closes_what_was_left_open_within_it(timeline: Timeline, clock: Clock) -> None:
    backward = timeline.enter(record.BACKWARD)
    timeline.enter(record.COLLECTIVE_WAIT)  # an exception in backward: nobody leaves it
    timeline.leave(backward)
    clock.now += 7
    timeline.leave(timeline.enter(record.FORWARD))
    assert seconds(timeline) == {"other": 7.0}


def test_the_first_step_has_no_duration_and_later_ones_go_into_the_histogram(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    for duration in (50.0, 0.04, 0.04, 1000.0):
        clock.now += duration
        timeline.step()
    slots = timeline.writer.slots
    buckets = slots[PLACES["step_buckets"] : PLACES["step_buckets"] + len(record.STEP_BOUNDS) + 1].tolist()
    assert slots[PLACES["steps"]] == 4
    assert {place: count for place, count in enumerate(buckets) if count} == {
        record.STEP_BOUNDS.index(0.05): 2,
        len(record.STEP_BOUNDS): 1,
    }
    assert slots[PLACES["step_seconds"]] == pytest.approx(1000.08)


def test_events_of_other_threads_are_ignored(timeline: Timeline, clock: Clock) -> None:
    def other() -> None:
        depth = timeline.enter(record.DATA_WAIT)
        clock.now += 5
        timeline.leave(depth)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    timeline.leave(timeline.enter(record.FORWARD))
    assert seconds(timeline) == {"other": 5.0}


def test_a_stopped_timeline_changes_nothing(timeline: Timeline, clock: Clock) -> None:
    timeline.stop()
    before = timeline.writer.slots.tolist()
    clock.now += 1
    timeline.leave(timeline.enter(record.FORWARD))
    timeline.step()
    assert timeline.writer.slots.tolist() == before
