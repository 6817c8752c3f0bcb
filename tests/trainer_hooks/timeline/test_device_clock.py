"""The device's time by phase: true where it can be known, absent where not, and nothing ever waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from testing.leaving import leave
from torch.nn.parallel import DistributedDataParallel

from rankscope.guard import Guard
from rankscope.probes import backward, ddp, device_time, device_wait
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline import device_clock
from rankscope.timeline.device_clock import DeviceClock
from rankscope.timeline.timeline import Timeline


class Host:
    """The host's clock, which stands still until it is told to go on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Stream:
    """Work runs in order and no earlier than it was issued."""

    device: str
    end: float = 0.0  # when the device will have done what was issued


class Event:
    """As torch.cuda.Event: it says no time before the device has passed it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.device = ""
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        assert not self.gpu.capturing, "the event would belong to the graph"
        assert self.device in ("", stream.device), "an event stays on the device where it was first recorded"
        self.device = stream.device
        self.at = stream.end = max(stream.end, self.gpu.host.now)

    def query(self) -> bool:
        assert not self.gpu.capturing, "asking ends a capture"
        return self.at <= self.gpu.host.now

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.at - self.at) * 1000

    def synchronize(self) -> None:
        self.gpu.synchronisations += 1


@dataclass
class Gpu:
    """A device that computes what the host issues, as much later as it takes."""

    host: Host = field(default_factory=Host)
    initialised: bool = True
    capturing: bool = False
    synchronisations: int = 0
    events: list[Event] = field(default_factory=list)
    stream: Stream = field(default_factory=lambda: Stream("cuda:0"))

    def is_in_use(self) -> bool:
        return self.initialised

    def is_capturing(self) -> bool:
        assert self.initialised, "CUDA was asked before the job initialised it"
        return self.capturing

    def current_stream(self) -> Stream:
        assert self.initialised, "CUDA was asked before the job initialised it"
        return self.stream

    def new_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def issue(self, seconds: float) -> None:
        """Work for the device, in the current stream; the host goes on at once."""
        self.stream.end = max(self.stream.end, self.host.now) + seconds

    def synchronize(self) -> None:
        """The host waits for all of it."""
        self.host.now = max(self.host.now, self.stream.end)


def fail(probe: str) -> None:
    raise AssertionError(probe)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def timeline(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    monkeypatch.setattr("rankscope.guard.reraise", True)
    return Timeline(RankWriter(), gpu.host)


@pytest.fixture
def clock(gpu: Gpu, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    """One that measures every step."""
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.0)
    return started(timeline, gpu)


def started(timeline: Timeline, gpu: Gpu) -> DeviceClock:
    clock = DeviceClock(timeline, Guard("device_time", fail), gpu)
    clock.start()
    timeline.step()  # ends start-up
    return clock


def phase(timeline: Timeline, gpu: Gpu, phase: int, seconds: float) -> None:
    """The host issues the work of a phase, which takes it a millisecond."""
    opened = timeline.enter(phase)
    gpu.issue(seconds)
    gpu.host.now += 0.001
    timeline.leave(opened)


def train(timeline: Timeline, gpu: Gpu, steps: int = 1) -> None:
    """Six seconds of the device's a step, issued in four milliseconds of the host's."""
    for _ in range(steps):
        phase(timeline, gpu, layout.FORWARD, 2)
        gpu.issue(0.5)  # the loss
        backward = timeline.enter(layout.BACKWARD)
        gpu.issue(2)
        phase(timeline, gpu, layout.COLLECTIVE_WAIT, 1)
        timeline.leave(backward)
        phase(timeline, gpu, layout.OPTIMIZER, 0.5)
        timeline.step()


def seconds(timeline: Timeline) -> dict[str, float]:
    """Phases that have any time of the device's."""
    index = INDEX["device_seconds"]
    values = timeline.writer.slots[index : index + len(layout.PHASES)].tolist()
    return {name: value for name, value in zip(layout.PHASES, values, strict=True) if value}


STEP = {"other": 0.5, "forward": 2, "backward": 2, "collective_wait": 1, "optimizer": 0.5}


@pytest.mark.usefixtures("clock")
def test_a_phase_gets_the_devices_time_of_the_work_that_was_issued_in_it(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx(STEP)


@pytest.mark.usefixtures("clock")
def test_a_step_counts_when_the_device_has_passed_all_of_it_and_not_before(timeline: Timeline, gpu: Gpu) -> None:
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
def test_nothing_ever_waits_for_the_device(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu, 20)
    assert gpu.host.now == pytest.approx(100 + 20 * 0.003)
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({phase: 20 * value for phase, value in STEP.items()})
    assert gpu.synchronisations == 0


def test_the_device_is_not_asked_before_the_job_uses_it(timeline: Timeline, gpu: Gpu) -> None:
    gpu.initialised = False
    started(timeline, gpu)
    train(timeline, gpu, 3)
    assert gpu.events == []
    gpu.initialised = True
    train(timeline, gpu, device_clock.UNUSED_STEPS)
    assert gpu.events


def test_steps_that_last_longer_than_their_marks_may_cost_are_all_measured(timeline: Timeline, gpu: Gpu) -> None:
    started(timeline, gpu)
    for _ in range(5):
        phase(timeline, gpu, layout.FORWARD, 1)
        gpu.synchronize()  # the loss is printed
        timeline.step()
    timeline.step()
    assert seconds(timeline) == pytest.approx({"forward": 5})


def test_of_short_steps_as_many_are_measured_as_the_marks_may_cost_each_from_start_to_end(
    timeline: Timeline, gpu: Gpu
) -> None:
    started(timeline, gpu)
    for _ in range(10_240):
        for number in (layout.FORWARD, layout.BACKWARD):
            phase(timeline, gpu, number, 0.001)
        timeline.step()
    found = seconds(timeline)
    assert found["forward"] == pytest.approx(found["backward"])
    # Five marks a step of 2 ms, at one mark each 0.1 s at the most: one of 250, hence one of 256, and the very first.
    assert timeline.writer.slots[INDEX["device_steps"]] == pytest.approx(40, abs=2)


def test_ranks_whose_steps_look_differently_long_measure_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_of_steps_with_very_many_marks_one_a_minute_is_measured(timeline: Timeline, gpu: Gpu) -> None:
    started(timeline, gpu)
    for _ in range(1300):
        for _ in range(1000):
            timeline.leave(timeline.enter(layout.FORWARD))
        gpu.host.now += 1
        timeline.step()
    # 2000 marks a step of a second: by the budget one of 256, and one of 64 as it is at least one a minute.
    assert timeline.writer.slots[INDEX["device_steps"]] == pytest.approx(1300 / 64, abs=2)


def last_entry(timeline: Timeline) -> list[float]:
    nth = int(timeline.writer.slots[INDEX["device_steps"]])
    return timeline.writer.device_ring[nth % layout.DEVICE_RING_STEPS].tolist()


@pytest.mark.usefixtures("clock")
def test_the_ring_has_each_measured_step_whole(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu, 3)
    ended = gpu.host.now
    timeline.writer.slots[INDEX["group_collectives"]] = 7  # by the next step's end
    gpu.synchronize()
    timeline.step()
    phases = [STEP.get(name, 0.0) for name in layout.PHASES]
    assert last_entry(timeline) == pytest.approx([3, 4, ended, 0, *phases])


@pytest.mark.usefixtures("clock")
def test_a_phase_of_the_scripts_own_is_other_in_the_ring(timeline: Timeline, gpu: Gpu) -> None:
    phase(timeline, gpu, len(layout.PHASES), 2)
    timeline.step()
    gpu.synchronize()
    timeline.step()
    assert last_entry(timeline)[4 + layout.OTHER] == pytest.approx(2)


def test_nobody_waits_for_the_host_while_the_device_is_behind(timeline: Timeline, gpu: Gpu, clock: DeviceClock) -> None:
    train(timeline, gpu, 3)
    wait_for_the_device(timeline, gpu)
    train(timeline, gpu, 3)
    gpu.synchronize()
    timeline.step()
    assert dry(timeline) == {}
    assert clock.measured is not None


@pytest.mark.usefixtures("clock")
def test_the_device_is_dry_while_it_keeps_up_with_a_host_that_issues_slowly(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(3):
        wait_for_the_device(timeline, gpu)
        for name in ("forward", "backward", "optimizer"):
            opened = timeline.enter(layout.PHASES.index(name))
            for _ in range(100):
                gpu.host.now += 0.01
                gpu.issue(0.001)
            timeline.leave(opened)
        timeline.step()
    gpu.synchronize()
    timeline.step()
    assert dry(timeline) == pytest.approx({"forward": 3, "backward": 3, "optimizer": 3}, rel=0.01)


@pytest.mark.usefixtures("clock")
def test_after_a_value_was_read_the_device_is_dry_until_it_gets_work(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(4):
        train(timeline, gpu)
        wait_for_the_device(timeline, gpu)
        gpu.host.now += 2  # the host logs what it has read
    gpu.synchronize()
    timeline.step()
    assert dry(timeline) == pytest.approx({"other": 6}, rel=0.01)  # the last one's step has not ended


def wait_for_the_device(timeline: Timeline, gpu: Gpu) -> None:
    opened = timeline.enter(layout.DEVICE_WAIT)
    gpu.synchronize()
    gpu.host.now += 0.0001
    timeline.leave(opened)


def dry(timeline: Timeline) -> dict[str, float]:
    index = INDEX["device_dry_seconds"]
    values = timeline.writer.slots[index : index + len(layout.PHASES)].tolist()
    return {name: value for name, value in zip(layout.PHASES, values, strict=True) if value > 1e-3}


@pytest.mark.usefixtures("clock")
def test_events_are_used_again(timeline: Timeline, gpu: Gpu) -> None:
    for _ in range(50):
        train(timeline, gpu)
        gpu.synchronize()
    assert len(gpu.events) < 20


@pytest.mark.usefixtures("clock")
def test_a_host_that_runs_too_far_ahead_leaves_a_gap_and_nothing_wrong(timeline: Timeline, gpu: Gpu) -> None:
    steps = device_clock.CAPACITY
    train(timeline, gpu, steps)
    assert len(gpu.events) == device_clock.CAPACITY
    gpu.synchronize()
    timeline.step()
    train(timeline, gpu)
    gpu.synchronize()
    timeline.step()
    found = seconds(timeline)
    measured = found["forward"] / STEP["forward"]
    assert steps / 10 < measured < steps
    assert {name: value / measured for name, value in found.items()} == pytest.approx(STEP, rel=0.05)


@pytest.mark.usefixtures("clock")
def test_a_graph_capture_gets_no_event_and_is_asked_nothing(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.synchronize()
    capture = timeline.enter(layout.FORWARD)
    gpu.capturing = True
    train(timeline, gpu)
    gpu.capturing = False
    timeline.leave(capture)
    train(timeline, gpu, 2)  # the capture has ended in the first
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({phase: 2 * value for phase, value in STEP.items()})


@pytest.mark.usefixtures("clock")
def test_a_step_within_which_a_scaler_skipped_others_is_not_measured(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    phase(timeline, gpu, layout.FORWARD, 100)
    timeline.writer.slots[INDEX["amp_skipped_steps"]] += 1
    train(timeline, gpu, 2)  # the first of them ends the step that is too long
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({phase: 2 * value for phase, value in STEP.items()})


@pytest.mark.usefixtures("clock")
def test_what_is_issued_in_another_stream_is_no_time_of_the_main_one(timeline: Timeline, gpu: Gpu) -> None:
    first, second = gpu.stream, Stream("cuda:0")
    phase(timeline, gpu, layout.FORWARD, 2)
    gpu.stream = second
    phase(timeline, gpu, layout.BACKWARD, 4)
    gpu.stream = first
    phase(timeline, gpu, layout.OPTIMIZER, 1)
    timeline.step()
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({"forward": 2, "optimizer": 1})


@pytest.mark.usefixtures("clock")
def test_a_step_may_begin_in_another_stream(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.stream = Stream("cuda:0", gpu.stream.end)
    timeline.step()
    train(timeline, gpu)
    gpu.synchronize()
    timeline.step()
    assert {name: value for name, value in seconds(timeline).items() if value > 0.01} == pytest.approx(
        {phase: 2 * value for phase, value in STEP.items()}
    )


@pytest.mark.usefixtures("clock")
def test_each_device_has_events_of_its_own(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    gpu.synchronize()
    timeline.step()
    gpu.stream = Stream("cuda:1")
    timeline.step()
    train(timeline, gpu)
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({phase: 2 * value for phase, value in STEP.items()})


def test_stopping_reads_what_is_done_and_leaves_nothing_behind(
    timeline: Timeline, gpu: Gpu, clock: DeviceClock
) -> None:
    train(timeline, gpu)
    gpu.host.now += 6
    clock.stop()
    assert seconds(timeline) == pytest.approx(STEP)
    assert (timeline.steps.on_end, timeline.on_boundary) == (None, None)


@pytest.mark.usefixtures("clock")
def test_a_forked_child_does_not_touch_the_device(timeline: Timeline, gpu: Gpu) -> None:
    train(timeline, gpu)
    events = len(gpu.events)
    gpu.initialised = False
    timeline.restart()
    train(timeline, gpu, 3)
    assert len(gpu.events) == events
    assert seconds(timeline) == {}


@pytest.mark.usefixtures("clock")
def test_an_error_of_the_device_switches_the_clock_off_and_not_the_training(
    timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.guard.reraise", False)

    def broken(_event: Event) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Event, "query", broken)
    train(timeline, gpu, 3)
    assert timeline.steps.count == 4
    assert seconds(timeline) == {}


@pytest.mark.usefixtures("run_dir")
def test_ddps_exposed_wait_lies_between_two_events(timeline: Timeline, gpu: Gpu, clock: DeviceClock) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    undo = [undo for probe in (ddp, backward) for undo in probe.install(timeline, Guard("ddp", fail))]
    gpu.issue(1)  # the device does not come to what follows
    model = DistributedDataParallel(torch.nn.Linear(2, 2))  # which the probe holds weakly
    model(torch.ones(1, 2)).sum().backward()
    for take_back in undo:
        take_back()
    leave()
    phases = [layout.OTHER, layout.FORWARD, layout.OTHER, layout.BACKWARD, layout.COLLECTIVE_WAIT]
    assert [mark.phase for mark in clock._marks] == [*phases, layout.OTHER]


def test_a_torch_for_the_cpu_has_no_device_to_time(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert device_time.install(timeline, Guard("device_time", fail)) == []
    assert timeline.steps.on_end is None


def test_a_torch_for_cuda_is_watched_until_it_is_taken_back(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    undo = device_time.install(timeline, Guard("device_time", fail))
    timeline.step()  # CUDA itself stays untouched, where there is none
    timeline.step()
    assert timeline.steps.on_end is not None
    for take_back in undo:
        take_back()
    assert (timeline.steps.on_end, timeline.on_boundary) == (None, None)


@pytest.fixture
def cuda(timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """torch.cuda on the device above, watched, every step measured; start-up is over."""
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    stand_in = Cuda(gpu)
    for name in ("is_initialized", "is_current_stream_capturing", "current_stream", "Event", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    undo = [
        undo for probe in (device_time, device_wait) for undo in probe.install(timeline, Guard("device_time", fail))
    ]
    timeline.step()
    yield stand_in
    for take_back in undo:
        take_back()


class Cuda:
    """What the hook asks of torch.cuda, with classes that may be patched."""

    def __init__(self, gpu: Gpu) -> None:
        self.is_initialized, self.is_current_stream_capturing = gpu.is_in_use, gpu.is_capturing
        self.current_stream, self.synchronize = gpu.current_stream, gpu.synchronize

        class CudaEvent(Event):
            def __init__(self, enable_timing: bool = False) -> None:
                self.can_tell_the_time = enable_timing
                super().__init__(gpu)

            def record(self, stream: Stream | None = None) -> None:
                super().record(stream or gpu.stream)

            def wait(self, stream: Stream | None = None) -> None:
                """The stream goes on when the event has come; the host goes on at once."""
                waiting = stream or gpu.stream
                waiting.end = max(waiting.end, self.at)

        class CudaStream(Stream):
            def synchronize(self) -> None:
                gpu.host.now = max(gpu.host.now, self.end)

        self.Event, self.Stream = CudaEvent, CudaStream
        gpu.stream = CudaStream("cuda:0")


def test_on_cuda_the_events_are_torchs_and_nothing_of_torchs_that_waits_is_called(
    timeline: Timeline, gpu: Gpu, cuda: Cuda
) -> None:
    train(timeline, gpu, 2)
    assert timeline.writer.slots[INDEX["device_waits"]] == 0
    gpu.synchronize()
    timeline.step()
    assert seconds(timeline) == pytest.approx({phase: 2 * value for phase, value in STEP.items()})
    assert gpu.synchronisations == 0


@pytest.mark.parametrize(
    ("met_in", "named"), [("collective_wait", "collective_wait"), ("h2d_copy", "h2d_copy"), ("forward", "other")]
)
def test_a_wait_of_the_main_stream_is_named_for_what_the_thread_did_in_the_other(
    timeline: Timeline, gpu: Gpu, cuda: Cuda, met_in: str, named: str
) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    for _ in range(2):
        gpu.stream = side
        phase(timeline, gpu, layout.PHASES.index(met_in), 5)
        event = cuda.Event()
        event.record()
        gpu.stream = main
        phase(timeline, gpu, layout.FORWARD, 2)
        event.wait(main)
        gpu.issue(1)
        timeline.step()
        gpu.synchronize()
    timeline.step()
    found = {name: value for name, value in seconds(timeline).items() if value > 0.01}
    waited = 6 if named != "other" else 8
    assert found == pytest.approx({"forward": 4, "other": 2, named: waited}, abs=0.01)


def test_a_wait_of_the_main_stream_counts_whichever_stream_is_current(timeline: Timeline, gpu: Gpu, cuda: Cuda) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.COLLECTIVE_WAIT, 5)
    event = cuda.Event()
    event.record()
    event.wait(main)
    gpu.stream = main
    gpu.synchronize()
    timeline.step()
    timeline.step()
    assert seconds(timeline)["collective_wait"] == pytest.approx(5, abs=0.01)


def test_an_event_of_the_step_before_is_known(
    timeline: Timeline, gpu: Gpu, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, side = gpu.stream, cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.H2D_COPY, 1)  # now the stream is known
    gpu.stream = main
    monkeypatch.setattr(device_clock, "SECONDS_PER_MARK", 0.1)
    event = cuda.Event()
    for _ in range(200):
        event.wait(main)  # of the batch that was copied in the last step
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


def test_a_communication_stream_that_waits_for_another_holds_nobody_up(
    timeline: Timeline, gpu: Gpu, cuda: Cuda
) -> None:
    main, side, third = gpu.stream, cuda.Stream("cuda:0"), cuda.Stream("cuda:0")
    gpu.stream = side
    phase(timeline, gpu, layout.COLLECTIVE_WAIT, 5)
    event = cuda.Event()
    event.record(side)
    event.wait(third)
    gpu.stream = main
    phase(timeline, gpu, layout.FORWARD, 2)
    timeline.step()
    gpu.synchronize()
    timeline.step()
    assert {name for name, value in seconds(timeline).items() if value > 0.01} == {"forward"}


def test_waiting_for_the_device_is_a_phase_of_the_hosts_and_no_time_of_the_devices(
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


def test_everything_is_taken_back(timeline: Timeline, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {owner: dict(vars(owner)) for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.Tensor)}
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    undo = [undo for probe in (device_time, device_wait) for undo in probe.install(timeline, Guard("probe", fail))]
    assert torch.cuda.synchronize is not before[torch.cuda]["synchronize"]
    for take_back in undo:
        take_back()
    assert {owner: dict(vars(owner)) for owner in before} == before
