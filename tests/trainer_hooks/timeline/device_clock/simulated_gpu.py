"""A simulated device with a clock that the test advances, and a training loop on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from testing.clock import Clock
from testing.own_record import fail

from rankscope.guard import Guard
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.device_clock import DeviceClock
from rankscope.timeline.timeline import Timeline


@dataclass(eq=False)
class Stream:
    """A stream: work runs in order, and not before it is issued."""

    device: str
    end: float = 0.0  # the time at which the issued work is done


class Event:
    """An event like torch.cuda.Event: it has no time before the device has passed it."""

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
        assert not self.gpu.capturing, "a query ends a capture"
        return self.at <= self.gpu.host.now

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.at - self.at) * 1000

    def synchronize(self) -> None:
        self.gpu.synchronizations += 1


@dataclass
class Gpu:
    """A device that executes the issued work asynchronously."""

    host: Clock = field(default_factory=lambda: Clock(100.0))
    initialized: bool = True
    capturing: bool = False
    synchronizations: int = 0
    events: list[Event] = field(default_factory=list)
    stream: Stream = field(default_factory=lambda: Stream("cuda:0"))

    def is_in_use(self) -> bool:
        return self.initialized

    def is_capturing(self) -> bool:
        assert self.initialized, "CUDA was called before the job initialized it"
        return self.capturing

    def current_stream(self, _device: int | None = None) -> Stream:
        assert self.initialized, "CUDA was called before the job initialized it"
        return self.stream

    def new_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def issue(self, seconds: float) -> None:
        """Issue work in the current stream, without blocking the host."""
        self.stream.end = max(self.stream.end, self.host.now) + seconds

    def synchronize(self) -> None:
        """Block the host until all work is done."""
        self.host.now = max(self.host.now, self.stream.end)


class Cuda:
    """The part of torch.cuda that the hook uses, with classes that can be patched."""

    def __init__(self, gpu: Gpu) -> None:
        self.is_initialized, self.is_current_stream_capturing = gpu.is_in_use, gpu.is_capturing
        self.current_stream, self.synchronize = gpu.current_stream, gpu.synchronize

        class CudaEvent(Event):
            def __init__(self, enable_timing: bool = False) -> None:
                self.has_timing = enable_timing
                super().__init__(gpu)

            def record(self, stream: Stream | None = None) -> None:
                super().record(stream or gpu.stream)

            def wait(self, stream: Stream | None = None) -> None:
                """Block the stream until the event, without blocking the host."""
                waiting = stream or gpu.stream
                waiting.end = max(waiting.end, self.at)

        class CudaStream(Stream):
            def synchronize(self) -> None:
                gpu.host.now = max(gpu.host.now, self.end)

        self.Event, self.Stream = CudaEvent, CudaStream
        gpu.stream = CudaStream("cuda:0")


def started(timeline: Timeline, gpu: Gpu) -> DeviceClock:
    clock = DeviceClock(timeline, Guard("device_time", fail), gpu)
    clock.start()
    timeline.step()  # ends startup
    return clock


def phase(timeline: Timeline, gpu: Gpu, phase: int, seconds: float) -> None:
    """Issue the work of a phase, which takes the host one millisecond."""
    opened = timeline.enter(phase)
    gpu.issue(seconds)
    gpu.host.now += 0.001
    timeline.leave(opened)


def train(timeline: Timeline, gpu: Gpu, steps: int = 1) -> None:
    """Make steps of six seconds of device time, issued in four milliseconds."""
    for _ in range(steps):
        phase(timeline, gpu, layout.FORWARD, 2)
        gpu.issue(0.5)  # the loss
        backward = timeline.enter(layout.BACKWARD)
        gpu.issue(2)
        phase(timeline, gpu, layout.COLLECTIVE_WAIT, 1)
        timeline.leave(backward)
        phase(timeline, gpu, layout.OPTIMIZER, 0.5)
        timeline.step()


def wait_for_the_device(timeline: Timeline, gpu: Gpu) -> None:
    opened = timeline.enter(layout.DEVICE_WAIT)
    gpu.synchronize()
    gpu.host.now += 0.0001
    timeline.leave(opened)


def read_values(timeline: Timeline, gpu: Gpu, count: int, *, issuing: float, computing: float) -> None:
    """Issue work and read its result, again and again."""
    for _ in range(count):
        gpu.issue(computing)
        gpu.host.now += issuing
        wait_for_the_device(timeline, gpu)


def finish(timeline: Timeline, gpu: Gpu) -> None:
    """Let the device finish all issued work, and end a step."""
    gpu.synchronize()
    timeline.step()


STEP = {"other": 0.5, "forward": 2, "backward": 2, "collective_wait": 1, "optimizer": 0.5}


def steps_of(count: int) -> dict[str, float]:
    """Return the device's seconds by phase in `count` steps."""
    return {phase: count * value for phase, value in STEP.items()}


def seconds(timeline: Timeline) -> dict[str, float]:
    """Return the device's seconds of all phases that have any."""
    index = INDEX["device_seconds"]
    values = timeline.writer.slots[index : index + len(layout.PHASES)].tolist()
    return {name: value for name, value in zip(layout.PHASES, values, strict=True) if value}


def dry(timeline: Timeline) -> dict[str, float]:
    index = INDEX["device_dry_seconds"]
    values = timeline.writer.slots[index : index + len(layout.PHASES)].tolist()
    return {name: value for name, value in zip(layout.PHASES, values, strict=True) if value > 1e-3}


def last_entry(timeline: Timeline) -> list[float]:
    nth = int(timeline.writer.slots[INDEX["device_steps"]])
    return timeline.writer.device_ring[nth % layout.DEVICE_RING_STEPS].tolist()
