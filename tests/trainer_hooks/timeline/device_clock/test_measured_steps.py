"""Choice of measured steps: within the budget of marks, and the same steps on every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    Gpu,
    finish,
    last_entry,
    phase,
    read_values,
    seconds,
    started,
    steps_of,
    train,
)

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline import device_clock
from rankscope.timeline.timeline import Timeline


def test_the_device_is_not_called_before_the_job_uses_it(timeline: Timeline, gpu: Gpu) -> None:
    gpu.initialized = False
    started(timeline, gpu)
    train(timeline, gpu, 3)
    assert gpu.events == []
    gpu.initialized = True
    train(timeline, gpu, device_clock.UNUSED_STEPS)
    assert gpu.events


def test_all_long_steps_are_measured(timeline: Timeline, gpu: Gpu) -> None:
    started(timeline, gpu)
    for _ in range(5):
        phase(timeline, gpu, layout.FORWARD, 1)
        gpu.synchronize()  # the loss is printed
        timeline.step()
    timeline.step()
    assert seconds(timeline) == pytest.approx({"forward": 5})


def test_short_steps_are_measured_completely_within_the_budget_of_marks(timeline: Timeline, gpu: Gpu) -> None:
    started(timeline, gpu)
    for _ in range(10_240):
        for number in (layout.FORWARD, layout.BACKWARD):
            phase(timeline, gpu, number, 0.001)
        timeline.step()
    found = seconds(timeline)
    assert found["forward"] == pytest.approx(found["backward"])
    # Five marks per step of 2 ms, at most one mark per 0.1 s: one of 250 steps, so one of 256, and the first step.
    assert timeline.writer.slots[INDEX["device_steps"]] == pytest.approx(40, abs=2)


def test_ranks_with_slightly_different_step_times_measure_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.guard.reraise", True)

    def measured(step_seconds: float) -> list[int]:
        gpu = Gpu()
        timeline = Timeline(RankWriter(), gpu.host)
        started(timeline, gpu)
        numbers = []
        for _ in range(4000):
            phase(timeline, gpu, layout.FORWARD, 0.001)
            gpu.host.now += step_seconds - 0.001
            timeline.step()
            numbers.append(int(last_entry(timeline)[1]))
        return sorted({*numbers} - {0})

    slower, faster = measured(0.011), measured(0.013)  # one of 32, and one of 32 or 16
    assert len({*slower} & {*faster}) > 0.9 * len(slower) > 100
    assert len({*measured(0.0249)} & {*slower}) > 0.9 * len(slower)


@pytest.mark.parametrize("reads", [5, 20, 150])
def test_a_step_with_many_reads_is_measured_as_often_as_one_with_few(timeline: Timeline, gpu: Gpu, reads: int) -> None:
    started(timeline, gpu)
    for _ in range(4096):
        phase(timeline, gpu, layout.FORWARD, 0.001)
        read_values(timeline, gpu, reads, issuing=0.0, computing=0.0001)
        gpu.host.now += 0.04 - 0.001 - 0.0002 * reads
        timeline.step()
    # Eleven marks per step of 40 ms: one of 32 steps.
    assert timeline.writer.slots[INDEX["device_steps"]] == pytest.approx(4096 / 32, abs=2)


@pytest.mark.parametrize(("phases", "every"), [(50, 4), (150, 4), (1000, 8)])
def test_a_step_with_many_marks_is_measured_each_few_seconds(
    timeline: Timeline, gpu: Gpu, phases: int, every: int
) -> None:
    started(timeline, gpu)
    for _ in range(1300):
        for _ in range(phases):
            timeline.leave(timeline.enter(layout.FORWARD))
        gpu.host.now += 1
        timeline.step()
    # Two marks per phase, in steps of one second: one step in 3 s, or in 10 s if there are 2000 marks.
    assert timeline.writer.slots[INDEX["device_steps"]] == pytest.approx(1300 / every, abs=2)


@pytest.mark.parametrize(("every", "seconds"), [(1, 0.065), (10, 0.065), (10, 0.2), (50, 0.2), (100, 0.03)])
def test_a_host_that_reads_a_value_each_few_steps_is_measured_as_often(
    timeline: Timeline, gpu: Gpu, every: int, seconds: float
) -> None:
    """The host issues the steps between two reads in milliseconds."""
    started(timeline, gpu)
    measured: set[float] = set()
    for step in range(1, round(300 / seconds)):
        for number in (layout.FORWARD, layout.BACKWARD):
            phase(timeline, gpu, number, seconds / 2)
        if step % every == 0:
            gpu.synchronize()
        timeline.step()
        measured |= {entry[1] for entry in timeline.writer.device_ring}
    gaps = [(after - before) * seconds for before, after in pairwise(sorted(measured)[8:])]
    # Five marks per step: a step each 0.5 s, at a random place in a block of up to 0.7 s.
    assert max(gaps) < 2 * 0.7
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.42)


@pytest.mark.usefixtures("clock")
def test_a_step_that_contains_skipped_ones_is_not_measured(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    phase(timeline, gpu, layout.FORWARD, 100)
    timeline.writer.slots[INDEX["amp_skipped_steps"]] += 1
    train(timeline, gpu, 2)  # the first one ends the long step
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx(steps_of(2))
