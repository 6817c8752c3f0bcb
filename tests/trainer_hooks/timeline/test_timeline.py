"""Phases partition the time; steps and startup are counted as the documentation of the metrics says."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch
from testing.clock import Clock
from testing.waiting import in_a_thread

from rankscope.probes.collectives import NOTHING, Collectives
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    timeline = Timeline(RankWriter(), clock)
    timeline.step()  # ends startup
    return timeline


def seconds(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of all phases that have any, without the open one's."""
    values = timeline.writer.slots[INDEX["phase_seconds"] : INDEX["phase_seconds"] + len(layout.PHASES)].tolist()
    return {name: value for name, value in zip(layout.PHASES, values, strict=True) if value}


def test_the_innermost_phase_gets_the_time(timeline: Timeline, clock: Clock) -> None:
    backward = timeline.enter(layout.BACKWARD)
    clock.now += 2
    wait = timeline.enter(layout.COLLECTIVE_WAIT)
    clock.now += 3
    timeline.leave(wait)
    clock.now += 1
    timeline.leave(backward)
    assert seconds(timeline) == {"backward": 3.0, "collective_wait": 3.0}


@pytest.mark.parametrize("absorbing", [layout.EVALUATION, layout.CHECKPOINT])
def test_evaluation_and_checkpoint_absorb_what_they_contain(timeline: Timeline, clock: Clock, absorbing: int) -> None:
    outer = timeline.enter(absorbing)
    clock.now += 1
    inner = timeline.enter(layout.DATA_WAIT)
    clock.now += 2
    timeline.leave(inner)
    timeline.leave(outer)
    assert seconds(timeline) == {layout.PHASES[absorbing]: 3.0}


def test_startup_absorbs_everything_up_to_the_end_of_the_first_step(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    clock.now += 4
    forward = timeline.enter(layout.FORWARD)
    clock.now += 5
    timeline.leave(forward)
    timeline.step()
    clock.now += 1
    timeline.leave(timeline.enter(layout.FORWARD))
    assert seconds(timeline) == {"startup": 9.0, "other": 1.0}


def test_a_phase_open_at_the_end_of_startup_closes_correctly(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    epoch = timeline.enter(layout.FORWARD)
    timeline.step()
    clock.now += 1
    timeline.leave(epoch)
    clock.now += 2
    timeline.leave(timeline.enter(layout.BACKWARD))
    assert seconds(timeline) == {"forward": 1.0, "other": 2.0}


def test_leaving_an_outer_phase_closes_the_phases_inside(timeline: Timeline, clock: Clock) -> None:
    backward = timeline.enter(layout.BACKWARD)
    timeline.enter(layout.COLLECTIVE_WAIT)  # an exception in backward: it is never left
    timeline.leave(backward)
    clock.now += 7
    timeline.leave(timeline.enter(layout.FORWARD))
    assert seconds(timeline) == {"other": 7.0}


def test_the_outer_of_two_overlapping_phases_closes_the_inner(timeline: Timeline, clock: Clock) -> None:
    outer = timeline.enter(layout.FORWARD)
    inner = timeline.enter(layout.H2D_COPY)
    clock.now += 1
    timeline.leave(outer)
    timeline.leave(inner)
    clock.now += 2
    timeline.leave(timeline.enter(layout.BACKWARD))
    assert seconds(timeline) == {"h2d_copy": 1.0, "other": 2.0}


class ProcessGroup:
    """A process group whose collectives torch does not count."""

    def size(self) -> int:
        return 2

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("this process group does not yet support sequence numbers")


def test_another_collective_or_phase_may_open_and_close_inside_a_collective(timeline: Timeline, clock: Clock) -> None:
    collectives, process_group = Collectives(timeline), ProcessGroup()
    forward = timeline.enter(layout.FORWARD)
    outer = collectives.begin(process_group, 0, timeline.groups.count_next)
    inner = collectives.begin(process_group, 1, timeline.groups.count_next)
    clock.now += 1
    assert inner is not None
    collectives.end_issue(inner, 1, NOTHING, None)
    clock.now += 1
    copy = timeline.enter(layout.H2D_COPY)
    clock.now += 4
    timeline.leave(copy)
    assert outer is not None
    collectives.end_issue(outer, 0, NOTHING, None)
    clock.now += 8
    timeline.leave(forward)
    assert seconds(timeline) == {"collective_wait": 2.0, "h2d_copy": 4.0, "forward": 8.0}
    assert timeline.writer.slots[INDEX["phase"]] == layout.OTHER


def test_a_collective_that_ends_after_its_outer_phase_opens_nothing(timeline: Timeline, clock: Clock) -> None:
    collectives = Collectives(timeline)
    backward = timeline.enter(layout.BACKWARD)
    call = collectives.begin(ProcessGroup(), 0, timeline.groups.count_next)
    timeline.leave(backward)  # an exception in backward
    assert call is not None
    collectives.end_issue(call, 0, NOTHING, None)
    clock.now += 2
    timeline.leave(timeline.enter(layout.OPTIMIZER))
    assert seconds(timeline) == {"other": 2.0}


def test_a_collective_inside_an_evaluation_is_evaluation(timeline: Timeline, clock: Clock) -> None:
    collectives = Collectives(timeline)
    evaluation = timeline.enter(layout.EVALUATION)
    call = collectives.begin(ProcessGroup(), 0, timeline.groups.count_next)
    clock.now += 2
    assert call is not None
    collectives.end_issue(call, 0, NOTHING, None)
    clock.now += 1
    timeline.leave(evaluation)
    assert seconds(timeline) == {"evaluation": 3.0}


def test_unwinding_inside_a_collective_leaves_no_collective_open(timeline: Timeline, clock: Clock) -> None:
    Collectives(timeline).begin(ProcessGroup(), 0, timeline.groups.count_next)
    timeline.unwind()
    clock.now += 2
    timeline.leave(timeline.enter(layout.OPTIMIZER))
    assert seconds(timeline) == {"other": 2.0}
    assert timeline.writer.slots[INDEX["collective_op"]] == 0


KEY, OTHER_KEY = 7, 8  # of works
ON_HOST = (400.0, True)  # a payload


def issue_synchronously(timeline: Timeline, collectives: Collectives, clock: Clock) -> None:
    """Issue a collective that takes one second and whose wait comes next."""
    call = collectives.begin(ProcessGroup(), 2, timeline.groups.count_next)
    clock.now += 1
    assert call is not None
    collectives.end_issue(call, 2, ON_HOST, KEY, is_awaited=True)


def test_a_synchronous_collective_is_one_event(timeline: Timeline, clock: Clock) -> None:
    collectives, slots = Collectives(timeline), timeline.writer.slots
    forward = timeline.enter(layout.FORWARD)
    issue_synchronously(timeline, collectives, clock)
    assert (slots[INDEX["phase"]], slots[INDEX["collective_op"]]) == (layout.COLLECTIVE_WAIT, 3)
    began = slots[INDEX["phase_since"]]
    wait = collectives.begin_wait(KEY)
    clock.now += 2
    assert (slots[INDEX["phase_since"]], slots[INDEX["collective_op"]]) == (began, 3)
    assert wait is not None
    collectives.end_wait(wait, is_complete=True)
    assert (slots[INDEX["phase"]], slots[INDEX["collective_op"]]) == (layout.FORWARD, 0)
    clock.now += 4
    timeline.leave(forward)
    assert seconds(timeline) == {"collective_wait": 3.0, "forward": 4.0}
    fields = ("collectives", "collective_bytes", "collective_seconds", "collective_duration_seconds")
    assert [slots[INDEX[field] + 2] for field in fields] == [1, 400, 3, 3]


def test_a_synchronous_collective_without_a_wait_ends_with_the_next_phase(timeline: Timeline, clock: Clock) -> None:
    collectives, slots = Collectives(timeline), timeline.writer.slots
    issue_synchronously(timeline, collectives, clock)
    timeline.leave(timeline.enter(layout.FORWARD))
    clock.now += 2
    call = collectives.begin(ProcessGroup(), 5, timeline.groups.count_next)
    assert slots[INDEX["collective_op"]] == 6
    assert call is not None
    collectives.end_issue(call, 5, NOTHING, None)
    assert seconds(timeline) == {"collective_wait": 1.0, "other": 2.0}
    assert slots[INDEX["collective_op"]] == 0


def test_a_wait_for_another_collective_than_the_synchronous_one_is_separate(timeline: Timeline, clock: Clock) -> None:
    collectives, slots = Collectives(timeline), timeline.writer.slots
    call = collectives.begin(ProcessGroup(), 5, timeline.groups.count_next)
    assert call is not None
    collectives.end_issue(call, 5, ON_HOST, OTHER_KEY)
    issue_synchronously(timeline, collectives, clock)
    wait = collectives.begin_wait(OTHER_KEY)
    assert slots[INDEX["collective_op"]] == 6
    clock.now += 2
    assert wait is not None
    collectives.end_wait(wait, is_complete=True)
    clock.now += 4
    timeline.leave(timeline.enter(layout.FORWARD))
    assert seconds(timeline) == {"collective_wait": 3.0, "other": 4.0}
    assert [slots[INDEX["collective_seconds"] + op] for op in (2, 5)] == [0, 2]
    assert slots[INDEX["collective_op"]] == 0


def test_unwinding_between_a_synchronous_collective_and_its_wait_leaves_none_open(
    timeline: Timeline, clock: Clock
) -> None:
    collectives = Collectives(timeline)
    issue_synchronously(timeline, collectives, clock)
    timeline.unwind()
    clock.now += 2
    timeline.leave(timeline.enter(layout.OPTIMIZER))
    assert seconds(timeline) == {"collective_wait": 1.0, "other": 2.0}
    assert timeline.writer.slots[INDEX["collective_op"]] == 0


def test_the_first_step_has_no_duration_and_later_ones_go_into_the_histogram(clock: Clock) -> None:
    timeline = Timeline(RankWriter(), clock)
    for duration in (50.0, 0.25, 0.25, 1000.0, 0.04):
        clock.now += duration
        timeline.step()
    slots = timeline.writer.slots
    buckets = slots[INDEX["step_buckets"] : INDEX["step_buckets"] + len(layout.STEP_BOUNDS) + 1].tolist()
    assert slots[INDEX["steps"]] == 5
    assert {index: count for index, count in enumerate(buckets) if count} == {
        layout.STEP_BOUNDS.index(0.05): 1,
        layout.STEP_BOUNDS.index(0.25): 2,
        len(layout.STEP_BOUNDS): 1,
    }
    assert slots[INDEX["step_seconds"]] == pytest.approx(1000.54)


def test_events_of_other_threads_are_ignored(timeline: Timeline, clock: Clock) -> None:
    def other() -> None:
        opened = timeline.enter(layout.DATA_WAIT)
        clock.now += 5
        timeline.leave(opened)

    in_a_thread(other)
    timeline.leave(timeline.enter(layout.FORWARD))
    assert seconds(timeline) == {"other": 5.0}


@pytest.mark.parametrize(
    ("phase", "graph_task", "is_counted"),
    [(layout.BACKWARD, 3, True), (layout.BACKWARD, -1, False), (layout.FORWARD, 3, False)],
)
def test_the_autograd_engines_thread_counts_for_the_thread_that_waits_for_it(
    timeline: Timeline, clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: int, graph_task: int, is_counted: bool
) -> None:
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: graph_task)
    is_done = threading.Event()

    def hook_of_a_gradient() -> None:
        opened = timeline.enter(layout.COLLECTIVE_WAIT)
        clock.now += 5
        timeline.leave(opened)
        is_done.set()

    outer = timeline.enter(phase)
    _thread.start_new_thread(hook_of_a_gradient, ())  # like the engine's: unknown to Python's threading
    is_done.wait()
    timeline.leave(outer)
    assert seconds(timeline) == {"collective_wait" if is_counted else layout.PHASES[phase]: 5.0}


def test_another_thread_of_the_script_with_its_own_backward_pass_is_ignored(
    timeline: Timeline, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 3)

    def other() -> None:
        opened = timeline.enter(layout.COLLECTIVE_WAIT)
        clock.now += 5
        timeline.leave(opened)

    outer = timeline.enter(layout.BACKWARD)
    in_a_thread(other)
    timeline.leave(outer)
    assert seconds(timeline) == {"backward": 5.0}


def test_a_stopped_timeline_changes_nothing(timeline: Timeline, clock: Clock) -> None:
    timeline.stop()
    before = timeline.writer.slots.tolist()
    clock.now += 1
    timeline.leave(timeline.enter(layout.FORWARD))
    timeline.step()
    assert timeline.writer.slots.tolist() == before


def test_no_part_of_the_timeline_has_so_many_attributes_that_access_is_slow(timeline: Timeline) -> None:
    shared_keys_limit = 30  # CPython 3.11's SHARED_KEYS_MAX_SIZE
    parts = [timeline, timeline.steps, timeline.groups, timeline.backward, timeline.checkpoints, timeline.job]
    assert max(len(vars(part)) for part in parts) < shared_keys_limit
