"""The clock on torch.cuda: it uses torch's events, classifies waits of streams, and is removed completely."""

from __future__ import annotations

import pytest
import torch
from testing.own_record import fail, installed
from tests.trainer_hooks.timeline.device_clock.simulated_gpu import (
    Cuda,
    Gpu,
    finish,
    phase,
    seconds,
    steps_of,
    train,
)

from rankscope.guard import Guard
from rankscope.probes import device_time, device_wait
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline import device_clock
from rankscope.timeline.timeline import Timeline


def test_a_cpu_build_of_torch_has_no_device_to_time(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert device_time.install(timeline, Guard("device_time", fail)) == []
    assert timeline.steps.on_end is None


def test_the_clock_uses_torchs_events_and_calls_no_function_that_waits(
    timeline: Timeline, gpu: Gpu, cuda: Cuda
) -> None:
    train(timeline, gpu, 2)
    assert timeline.writer.slots[INDEX["device_waits"]] == 0
    finish(timeline, gpu)
    assert seconds(timeline) == pytest.approx(steps_of(2))
    assert gpu.synchronizations == 0


@pytest.mark.parametrize(
    ("other_phase", "expected"),
    [("collective_wait", "collective_wait"), ("h2d_copy", "h2d_copy"), ("forward", "other")],
)
def test_a_wait_of_the_main_stream_is_classified_by_the_phase_in_the_other_stream(
    timeline: Timeline, gpu: Gpu, cuda: Cuda, other_phase: str, expected: str
) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    for _ in range(2):
        gpu.stream = side
        phase(timeline, gpu, layout.PHASES.index(other_phase), 5)
        event = cuda.Event()
        event.record()
        gpu.stream = main
        phase(timeline, gpu, layout.FORWARD, 2)
        event.wait(main)
        gpu.issue(1)
        timeline.step()
        finish(timeline, gpu)
    found = {name: value for name, value in seconds(timeline).items() if value > 0.01}
    waited = 6 if expected != "other" else 8
    assert found == pytest.approx({"forward": 4, "other": 2, expected: waited}, abs=0.01)


def test_a_wait_of_the_main_stream_counts_whichever_stream_is_current(timeline: Timeline, gpu: Gpu, cuda: Cuda) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.COLLECTIVE_WAIT, 5)
    event = cuda.Event()
    event.record()
    event.wait(main)
    gpu.stream = main
    finish(timeline, gpu)
    timeline.step()
    assert seconds(timeline)["collective_wait"] == pytest.approx(5, abs=0.01)


def test_an_event_of_the_last_step_is_known(
    timeline: Timeline, gpu: Gpu, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.H2D_COPY, 1)  # classifies the stream
    gpu.stream = main
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.1)
    event = cuda.Event()
    for _ in range(200):
        event.wait(main)  # for the batch copied in the last step
        gpu.stream = side
        gpu.issue(0.05)
        event = cuda.Event()
        event.record()
        gpu.stream = main
        gpu.host.now += 0.01
        timeline.step()
        gpu.synchronize()
    slots = timeline.writer.slots
    measured = slots[INDEX["device_steps"]]
    assert 20 < measured < 120
    assert slots[INDEX["device_seconds"] + layout.H2D_COPY] > 0.9 * 0.04 * measured


def test_a_wait_of_a_communication_stream_for_another_does_not_count(timeline: Timeline, gpu: Gpu, cuda: Cuda) -> None:
    main, side, third = gpu.stream, cuda.Stream("cuda:0"), cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.COLLECTIVE_WAIT, 5)
    event = cuda.Event()
    event.record(side)
    event.wait(third)
    gpu.stream = main
    phase(timeline, gpu, layout.FORWARD, 2)
    timeline.step()
    finish(timeline, gpu)
    assert {name for name, value in seconds(timeline).items() if value > 0.01} == {"forward"}


def test_waiting_for_the_device_is_a_phase_of_the_host_but_not_of_the_device(
    timeline: Timeline, gpu: Gpu, cuda: Cuda
) -> None:
    phase(timeline, gpu, layout.FORWARD, 2)
    torch.cuda.synchronize()
    phase(timeline, gpu, layout.BACKWARD, 3)
    gpu.stream.synchronize()
    timeline.step()
    timeline.step()
    host = timeline.writer.slots[INDEX["phase_seconds"] + layout.DEVICE_WAIT]
    assert host == pytest.approx(5 - 0.002)
    assert timeline.writer.slots[INDEX["device_waits"]] == 2
    assert seconds(timeline) == pytest.approx({"forward": 2, "backward": 3})


def test_everything_is_restored(timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {owner: dict(vars(owner)) for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.Tensor)}
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with installed(timeline, device_time, device_wait):
        assert torch.cuda.synchronize is not before[torch.cuda]["synchronize"]
        assert timeline.steps.on_end is not None
    assert {owner: dict(vars(owner)) for owner in before} == before
    assert (timeline.steps.on_end, timeline.on_boundary) == (None, None)
