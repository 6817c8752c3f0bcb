"""Time in which the device had no issued work, by the host's phase."""

from __future__ import annotations

import pytest
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    Gpu,
    dry,
    finish,
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
