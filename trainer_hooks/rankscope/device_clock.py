"""The device's time by phase: events in the training thread's stream, read when the device has passed them.

On a GPU the host runs ahead, so its own phases say when work was issued and not how long it took. Where the phase
changes, an event is recorded in the current stream; what lies between two of them is charged to the phase that the
host was in when it issued that work. So the seconds of all phases together *are* the device time that was observed, and
shares of it are right however much of the training that is.

Nothing here waits for the device: an event is asked whether it is done (`query`), and two that are give the time
between them. What cannot be known (a graph capture, a change of the stream, no event left) is not charged to any phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rankscope.guard import Guard
from rankscope.record import PLACES
from rankscope.timeline import Timeline

DEVICE_SECONDS = PLACES["device_seconds"]
UNMEASURED = -1

# A mark costs up to ten microseconds in all (a stream's look-up, a record, a query and a reading), and a step has a
# dozen. At one mark each 0.1 s that is 0.01 % of the time: steps of a second and more are all measured, of shorter ones
# about one a second, from its start to its end.
SECONDS_PER_MARK = 0.1
UNUSED_INTERVAL = 1.0  # seconds between two looks whether the job uses the device by now

# Marks that the device has not passed yet. A host that runs further ahead than this (a launch queue holds about a
# thousand kernels) leaves a gap.
CAPACITY = 1024


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Put it at the stream's end; it may have been elsewhere before."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another that the device has passed too."""


class Device(Protocol):
    """What the clock asks of a kind of device. Streams compare equal if they are the same and know their `device`."""

    def is_in_use(self) -> bool:
        """Whether the job has initialised it in this very process, not in the one that it was forked from."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then an event belongs to the graph."""

    def current_stream(self) -> Any:
        """The calling thread's."""

    def new_event(self) -> Event:
        """One that can tell the time."""


@dataclass(slots=True)
class Mark:
    """The device passed `event` in `stream`, and from there on worked for `phase`."""

    event: Event
    stream: Any
    phase: int


class DeviceClock:
    """Chooses the steps that are measured, marks their phases and reads the marks later, all in the training thread.

    `jitter` gives random numbers from 0 to 1: what happens each n-th step, a checkpoint say, must not always be
    measured or never.
    """

    def __init__(self, timeline: Timeline, guard: Guard, device: Device, jitter: Callable[[], float]) -> None:
        self._timeline = timeline
        self._guarded_step, self._guarded_mark = guard(self.step), guard(self.mark)
        self._guarded_read = guard(self._read)
        self._device = device
        self._jitter = jitter
        self._marks: deque[Mark] = deque()
        self._free: dict[Any, list[Event]] = {}  # by device, for an event stays on the one where it was first recorded
        self._due = self._began = 0.0
        self._count = 0
        self._measuring = False

    def start(self) -> None:
        """Look at the end of each step whether the next one shall be measured."""
        self._timeline.on_step = self._guarded_step

    def stop(self) -> None:
        """Measure no more; what the device has not passed yet stays unknown."""
        self._timeline.on_step = self._timeline.on_boundary = None
        self._guarded_read()
        self._forget()

    def step(self, now: float, phase: int) -> None:
        """A step ended at `now` (the host's clock), with `phase` open."""
        if now < self._due and not self._marks:
            return
        if not self._device.is_in_use():
            self._forget()
            self._due = now + UNUSED_INTERVAL
            return
        self._read()
        if self._measuring:
            self._due = self._began + self._count * SECONDS_PER_MARK * (0.5 + self._jitter())
        was_measuring, self._measuring = self._measuring, now >= self._due
        if self._measuring:
            self._began, self._count = now, 0
        if self._measuring != was_measuring:
            self.mark(phase if self._measuring else UNMEASURED)
            self._timeline.on_boundary = self._guarded_mark if self._measuring else None

    def mark(self, phase: int) -> None:
        """What is issued from now on is issued in `phase`."""
        self._count += 1
        if self._device.is_capturing() or not self._has_room():
            self._break()
            return
        stream = self._device.current_stream()
        if self._marks and self._marks[-1].stream != stream:
            self._break()
        free = self._free.setdefault(stream.device, [])
        event = free.pop() if free else self._device.new_event()
        event.record(stream)
        self._marks.append(Mark(event, stream, phase))

    def _has_room(self) -> bool:
        if len(self._marks) >= CAPACITY:
            self._read()
        return len(self._marks) < CAPACITY

    def _break(self) -> None:
        """What comes after the last mark cannot be measured."""
        if self._marks:
            self._marks[-1].phase = UNMEASURED

    def _read(self) -> None:
        """Charge what lies between marks that the device has passed. Not in a capture: asking would end that."""
        marks = self._marks
        if not marks or self._device.is_capturing():
            return
        slots = self._timeline.writer.slots
        while len(marks) > 1 and marks[1].event.query():
            mark = self._pop()
            if mark.phase != UNMEASURED:
                slots[DEVICE_SECONDS + mark.phase] += mark.event.elapsed_time(marks[0].event) / 1000
        if len(marks) == 1 and marks[0].phase == UNMEASURED:
            self._pop()

    def _pop(self) -> Mark:
        mark = self._marks.popleft()
        self._free[mark.stream.device].append(mark.event)
        return mark

    def _forget(self) -> None:
        self._marks.clear()
        self._free.clear()
        self._measuring, self._timeline.on_boundary = False, None
