"""Time in which the device had no issued work, by the host's phase."""

from __future__ import annotations

import pytest
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    Gpu,
    dry,
    finish,
    read_values,
    seconds,
    train,
    wait_for_the_device,
)

from rankscope.record import layout
from rankscope.timeline.device_clock import DeviceClock
from rankscope.timeline.timeline import Timeline


def test_the_device_is_not_dry_while_it_lags_the_host(timeline: Timeline, gpu: Gpu, clock: DeviceClock) -> None:
    train(timeline, gpu, 3)
    wait_for_the_device(timeline, gpu)
    train(timeline, gpu, 3)
    finish(timeline, gpu)
    assert dry(timeline) == {}
    assert clock.measured is not None


@pytest.mark.usefixtures("clock")
def test_the_device_is_dry_while_it_keeps_up_with_a_slow_host(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(3):
        wait_for_the_device(timeline, gpu)
        for name in ("forward", "backward", "optimizer"):
            opened = timeline.enter(layout.PHASES.index(name))
            for _ in range(100):
                gpu.host.now += 0.01
                gpu.issue(0.001)
            timeline.leave(opened)
        timeline.step()
    finish(timeline, gpu)
    assert dry(timeline) == pytest.approx({"forward": 3, "backward": 3, "optimizer": 3}, rel=0.01)


@pytest.mark.usefixtures("clock")
def test_after_a_value_is_read_the_device_is_dry_until_it_gets_work(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(4):
        train(timeline, gpu)
        wait_for_the_device(timeline, gpu)
        gpu.host.now += 2  # the host logs what it has read
    finish(timeline, gpu)
    assert dry(timeline) == pytest.approx({"other": 6}, rel=0.01)  # the last step has not ended


@pytest.mark.usefixtures("clock")
def test_the_phases_and_the_dry_time_are_right_however_many_values_are_read(timeline: Timeline, gpu: Gpu) -> None:
    began = gpu.host.now
    for _ in range(3):
        wait_for_the_device(timeline, gpu)
        opened = timeline.enter(layout.FORWARD)
        gpu.host.now += 0.1
        gpu.issue(0.01)
        timeline.leave(opened)
        read_values(timeline, gpu, 150, issuing=0.002, computing=0.0005)
        timeline.step()
    timeline.step()
    assert sum(seconds(timeline).values()) == pytest.approx(gpu.host.now - began)
    assert seconds(timeline)["forward"] == pytest.approx(3 * 0.11)  # with the last kernel
    # Until the first value is there, the device runs the last kernel of the forward pass.
    assert dry(timeline) == pytest.approx({"forward": 3 * 0.1, "other": 3 * 149 * 0.002}, rel=0.002)


@pytest.mark.usefixtures("clock")
def test_the_device_is_not_dry_while_the_host_waits_for_long_kernels(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(3):
        read_values(timeline, gpu, 50, issuing=0.001, computing=0.02)
        timeline.step()
    finish(timeline, gpu)
    assert dry(timeline).get("other", 0.0) < 0.06 * seconds(timeline)["other"]
