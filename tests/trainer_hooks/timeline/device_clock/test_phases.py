"""The device's time by phase: correct if it is known, otherwise absent; nothing ever waits for the device."""

from __future__ import annotations

import pytest
import torch
from testing.own_record import installed
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    STEP,
    Event,
    Gpu,
    Stream,
    finish,
    last_entry,
    phase,
    seconds,
    steps_of,
    train,
)
from torch.nn.parallel import DistributedDataParallel

from rankscope.probes import backward, ddp
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline import device_clock
from rankscope.timeline.device_clock import DeviceClock
from rankscope.timeline.timeline import Timeline


@pytest.mark.usefixtures("clock")
def test_a_step_counts_when_the_device_has_finished_all_of_it(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.host.now += 5.9
    timeline.step()
    assert seconds(timeline) == {}
    gpu.host.now += 0.1
    timeline.step()
    assert seconds(timeline) == pytest.approx(STEP)


@pytest.mark.usefixtures("clock")
def test_the_phases_partition_the_devices_time_whether_it_works_or_idles(timeline: Timeline, gpu: Gpu) -> None:
    began = gpu.host.now
    for _ in range(3):
        train(timeline, gpu, 2)
        gpu.synchronize()
        data_wait = timeline.enter(layout.DATA_WAIT)
        gpu.host.now += 3
        timeline.leave(data_wait)
    for _ in range(2):
        timeline.step()
    assert sum(seconds(timeline).values()) == pytest.approx(gpu.host.now - began)
    assert seconds(timeline)["data_wait"] == pytest.approx(9)


@pytest.mark.usefixtures("clock")
def test_a_wait_belongs_to_the_group_of_the_collective_that_is_open_and_to_none_where_that_is_unknown(
    timeline: Timeline, gpu: Gpu
) -> None:
    slots, first = timeline.writer.slots, INDEX["device_group_wait_seconds"]
    for group, waited in ((3, 1), (0, 2), (3, 4), (None, 8)):
        opened = timeline.enter(layout.COLLECTIVE_WAIT)
        slots[INDEX["collective_group"]] = 5 if group is None else group
        slots[INDEX["collective_op"]] = group is not None
        gpu.issue(waited)
        timeline.leave(opened)
        slots[INDEX["collective_op"]] = 0
        phase(timeline, gpu, layout.FORWARD, 1)
    timeline.step()
    finish(timeline, gpu)
    found = slots[first : first + layout.MAX_GROUPS].tolist()
    assert {group: waited for group, waited in enumerate(found) if waited} == pytest.approx({0: 2, 3: 5})
    assert seconds(timeline)["collective_wait"] == pytest.approx(15)


@pytest.mark.usefixtures("clock")
def test_nothing_ever_waits_for_the_device(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu, 20)
    assert gpu.host.now == pytest.approx(100 + 20 * 0.003)
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx(steps_of(20))
    assert gpu.synchronizations == 0


@pytest.mark.usefixtures("clock")
def test_the_ring_has_each_measured_step_completely(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu, 3)
    ended = gpu.host.now
    timeline.writer.slots[INDEX["group_collectives"]] = 7  # belongs to the next step
    finish(timeline, gpu)
    phases = [STEP.get(name, 0.0) for name in layout.PHASES]
    assert last_entry(timeline) == pytest.approx([3, 4, ended, 0, *phases])


@pytest.mark.usefixtures("clock")
def test_the_scripts_own_phase_is_other_in_the_ring(timeline: Timeline, gpu: Gpu) -> None:
    phase(timeline, gpu, len(layout.PHASES), 2)
    timeline.step()
    finish(timeline, gpu)
    assert last_entry(timeline)[4 + layout.OTHER] == pytest.approx(2)


@pytest.mark.usefixtures("clock")
def test_events_are_reused(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(50):
        train(timeline, gpu)
        gpu.synchronize()
    assert len(gpu.events) < 20


@pytest.mark.usefixtures("clock")
def test_a_host_that_runs_too_far_ahead_leaves_a_gap_and_no_error(timeline: Timeline, gpu: Gpu) -> None:
    steps = device_clock.CAPACITY
    train(timeline, gpu, steps)
    assert len(gpu.events) == device_clock.CAPACITY
    finish(timeline, gpu)
    train(timeline, gpu)
    finish(timeline, gpu)
    found = seconds(timeline)
    measured = found["forward"] / STEP["forward"]
    assert steps / 10 < measured < steps
    assert {name: value / measured for name, value in found.items()} == pytest.approx(STEP, rel=0.05)


@pytest.mark.usefixtures("clock")
def test_a_graph_capture_gets_no_event_and_no_query(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.synchronize()
    capture = timeline.enter(layout.FORWARD)
    gpu.capturing = True
    train(timeline, gpu)
    gpu.capturing = False
    timeline.leave(capture)
    train(timeline, gpu, 2)  # the capture ends in the first
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx(steps_of(2))


@pytest.mark.usefixtures("clock")
def test_work_in_another_stream_does_not_count(timeline: Timeline, gpu: Gpu) -> None:
    first, second = gpu.stream, Stream("cuda:0")
    phase(timeline, gpu, layout.FORWARD, 2)
    gpu.stream = second
    phase(timeline, gpu, layout.BACKWARD, 4)
    gpu.stream = first
    phase(timeline, gpu, layout.OPTIMIZER, 1)
    timeline.step()
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx({"forward": 2, "optimizer": 1})


@pytest.mark.usefixtures("clock")
def test_a_step_may_begin_in_another_stream(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.stream = Stream("cuda:0", gpu.stream.end)
    timeline.step()
    train(timeline, gpu)
    finish(timeline, gpu)
    assert {name: value for name, value in seconds(timeline).items() if value > 0.01} == pytest.approx(steps_of(2))


@pytest.mark.usefixtures("clock")
def test_each_device_has_its_own_events(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    finish(timeline, gpu)
    gpu.stream = Stream("cuda:1")
    timeline.step()
    train(timeline, gpu)
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx(steps_of(2))


def test_stop_reads_finished_work_and_leaves_nothing_behind(timeline: Timeline, gpu: Gpu, clock: DeviceClock) -> None:
    train(timeline, gpu)
    gpu.host.now += 6
    clock.stop()
    assert seconds(timeline) == pytest.approx(STEP)
    assert (timeline.steps.on_end, timeline.on_boundary) == (None, None)


@pytest.mark.usefixtures("clock")
def test_a_forked_child_does_not_touch_the_device(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    events = len(gpu.events)
    gpu.initialized = False
    timeline.restart()
    train(timeline, gpu, 3)
    assert len(gpu.events) == events
    assert seconds(timeline) == {}


@pytest.mark.usefixtures("clock")
def test_an_error_of_the_device_disables_the_clock_but_not_the_training(
    timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.guard.reraise", False)

    def broken(_event: Event) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Event, "query", broken)
    train(timeline, gpu, 3)
    assert timeline.steps.count == 4
    assert seconds(timeline) == {}


@pytest.mark.usefixtures("process_group")
def test_ddps_exposed_wait_is_between_two_events(timeline: Timeline, gpu: Gpu, clock: DeviceClock) -> None:
    with installed(timeline, ddp, backward):
        gpu.issue(1)  # the device does not reach the following work
        model = DistributedDataParallel(torch.nn.Linear(2, 2))  # the probe holds it weakly
        model(torch.ones(1, 2)).sum().backward()
    phases = [layout.OTHER, layout.FORWARD, layout.OTHER, layout.BACKWARD, layout.COLLECTIVE_WAIT]
    assert [mark.phase for mark in clock._marks] == [*phases, layout.OTHER]
