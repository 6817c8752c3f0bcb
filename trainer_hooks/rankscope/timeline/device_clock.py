"""The device's time by phase: events in the training thread's stream, read when the device has passed them.

On a GPU the host runs ahead, so its own phases say when work was issued and not how long it took. Where the phase
changes, an event is recorded in the stream that the training thread computes in; what lies between two of them is
charged to the phase that the host was in when it issued that work. Single steps are measured so, from begin to end,
the same ones on every rank (sampling.py). They are charged when the device has done all of a step, so that shares of
the seconds are right however few steps that is.

Nothing here waits for the device: an event is asked whether it is done (`query`), and two that are give the time
between them. A step of which a part cannot be known (a graph capture, no event left), or within which a gradient scaler
has skipped others, is not charged at all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log2
from typing import Any, Protocol

from rankscope.guard import Guard
from rankscope.record import phases
from rankscope.record.layout import COLLECTIVE_WAIT, DEVICE_RING_STEPS, INDEX, MAX_GROUPS, MAX_PHASES, OTHER, PHASES
from rankscope.record.sampling import MAX_LEVEL, next_sampled
from rankscope.timeline.groups import GROUP_COLLECTIVES
from rankscope.timeline.steps import STEPS
from rankscope.timeline.streams import IDENTIFYING, Streams
from rankscope.timeline.timeline import Timeline

DEVICE_STEPS = INDEX["device_steps"]
SKIPPED = INDEX["amp_skipped_steps"]
DEVICE_SECONDS = INDEX["device_seconds"]
DRY_SECONDS = INDEX["device_dry_seconds"]
GROUP_WAIT = INDEX["device_group_wait_seconds"]
OPEN_OP, OPEN_GROUP = INDEX["collective_op"], INDEX["collective_group"]

# A mark costs up to ten microseconds in all (a stream's look-up, a record, a query and a reading), and a step has a
# dozen. At one mark each 0.1 s that is 0.01 % of the time: steps of a second and more are all measured, of shorter ones
# about one a second. As it is one step of a power of two, the marks may be 1.4 times as many or as few.
SECONDS_PER_MARK = 0.1
LONGEST_GAP = 60.0  # seconds: of steps with hundreds of marks one a minute is measured all the same
STEADY = 0.7  # by how much the budget's power may differ from the one in use before that changes
SHORTEST = 1e-6  # seconds between two steps, so that the clock may stand still
UNUSED_STEPS = 64  # between two questions whether the job uses the device by now

# Marks that the device has not passed yet. A host that runs further ahead than this (a launch queue holds about a
# thousand kernels) leaves a gap.
CAPACITY = 1024

# If the device has passed the beginning of one of these when it ends, it has nothing to do by then.
ISSUES_NOTHING = frozenset(index for index, phase in enumerate(phases.PHASES) if phase.issues_nothing)
# In these a device that has nothing to do waits for the host to issue something; in the script's own phases, too.
MAY_BE_DRY = frozenset({*map(PHASES.index, phases.ISSUING), *range(len(PHASES), MAX_PHASES)})
# By which part of the step the device may be behind the host while it still counts as one that keeps up with it.
KEEPS_UP = 0.05


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Put it at the stream's end; it may have been elsewhere before."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another that the device has passed too."""


class Device(Protocol):
    """What the clock asks of a kind of device. Streams are hashable, equal if they are the same, and know `device`."""

    def is_in_use(self) -> bool:
        """Whether the job has initialized it in this very process, not in the one that it was forked from."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then an event belongs to the graph."""

    def current_stream(self) -> Any:
        """The one that the calling thread's work goes into."""

    def new_event(self) -> Event:
        """Not recorded yet, and able to tell the time, which torch's are not by default."""


@dataclass(slots=True)
class MeasuredStep:
    """A step between its first mark and the moment in which the device has passed its last."""

    skipped_before: float = 0.0  # optimizer steps that a gradient scaler had skipped when it began
    is_whole: bool = True  # nothing of it is missing
    number: int = 0
    end: float = 0.0
    sequence: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0] * MAX_PHASES)
    group_waits: list[tuple[int, float]] = field(default_factory=list)  # a group's index and the seconds of one wait
    behind: list[tuple[int, float, float]] = field(default_factory=list)
    """Intervals in which the device may have been dry: the phase, its seconds, by how many it was behind the host."""


@dataclass(slots=True)
class Mark:
    """The device passed `event` in `stream`, and from there on worked for `phase` of `step`; None: of none."""

    event: Event
    stream: Any
    phase: int
    step: MeasuredStep | None
    issued: float  # by the host's clock
    found_dry: bool = False  # the device had passed everything that was issued before
    group: int = MAX_GROUPS  # index of the collective's group if the mark ends a wait; MAX_GROUPS: not known


class DeviceClock:
    """Marks the phases of the steps that are measured and reads the marks later, all for the training thread."""

    def __init__(self, timeline: Timeline, guard: Guard, device: Device) -> None:
        self._timeline = timeline
        self._guarded_step, self._guarded_mark = guard(self.step), guard(self.mark)
        self._guarded_read = guard(self._read)
        self._device = device
        self._marks: deque[Mark] = deque()
        self._free: dict[Any, list[Event]] = {}  # by device, for an event stays on the one where it was first recorded
        self.measured: MeasuredStep | None = None  # the step that is being measured
        self._next = self._level = 0  # the step that is to be measured next, and of how many it is one
        self._last = (0, 0.0)  # number and end of the step before the one that was measured first, then of the last one
        self._count = 0  # marks in the step that is measured
        self.streams = Streams()
        self._behind: float | None = None  # how far the device was behind the host at the mark read last, if known

    def start(self) -> None:
        """Decide at the end of each step whether the next one shall be measured."""
        self._timeline.steps.on_end = self._guarded_step

    def stop(self) -> None:
        """Measure no more; what the device has not passed yet stays unknown."""
        self._timeline.steps.on_end = self._timeline.on_boundary = None
        self._guarded_read()
        self._forget()

    def step(self, now: float, phase: int) -> None:
        """A step ended at `now` (the host's clock), with `phase` open."""
        number = int(self._timeline.writer.slots[STEPS])
        if number == 1:
            self._restart()
        if number + 2 < self._next and not self._marks:
            return
        if not self._device.is_in_use():
            self._forget()
            self._next = number + UNUSED_STEPS
            return
        ended, self.measured = self.measured, None
        if ended is not None:
            self._end(ended, number, now)
        self._read()
        self.streams.are_watched = number + 2 >= self._next
        if number + 1 >= self._next:
            self._begin(number, now, phase, ended)
        elif ended is not None:
            self._put(phase, now, None, ended)
        if (self.measured is None) is not (ended is None):
            self._timeline.on_boundary = self._guarded_mark if self.measured else None

    def mark(self, phase: int) -> None:
        """What is issued from now on is issued in `phase`."""
        step = self.measured
        if step is None:
            return
        last = self._marks[-1]
        if phase in IDENTIFYING:
            current = self._device.current_stream()
            self.streams.met(current, phase)
            if current != self.streams.main and not self.streams.main_waits:
                return  # FSDP issues its collectives so, several a layer: the main stream has nothing of it
        if phase == last.phase:
            return
        self._count += 1
        found_dry = last.phase in ISSUES_NOTHING and not self._device.is_capturing() and last.event.query()
        self._put(phase, self._timeline.last_event, step, step, found_dry)

    def _begin(self, number: int, now: float, phase: int, ended: MeasuredStep | None) -> None:
        """Measure the step after `number`, or if that cannot be the next that is to be."""
        stream = self._device.current_stream()
        if ended is not None and stream != self.streams.main:
            self._put(phase, now, None, ended)
        self.streams.begin_step(stream)
        step = MeasuredStep(self._timeline.writer.slots[SKIPPED])
        self._put(phase, now, step, ended)
        if not step.is_whole:
            self._next = next_sampled(number + 2, self._level)
            return
        self.measured = step
        self._count = 1
        if not self._last[0]:
            self._last = number, now

    def _end(self, step: MeasuredStep, number: int, now: float) -> None:
        slots = self._timeline.writer.slots
        step.number, step.end, step.sequence = number, now, slots[GROUP_COLLECTIVES]
        if slots[SKIPPED] > step.skipped_before:
            step.is_whole = False  # as long as several: while a scaler's scale collapses, as long as minutes
        before, ended = self._last
        self._last = number, now
        gap = min(self._count * SECONDS_PER_MARK, LONGEST_GAP)
        wanted = log2(max(1.0, gap * (number - before) / max(now - ended, SHORTEST)))
        if abs(wanted - self._level) > STEADY:
            self._level = min(round(wanted), MAX_LEVEL)
        self._next = next_sampled(number + 1, self._level)

    def _put(
        self, phase: int, now: float, step: MeasuredStep | None, ending: MeasuredStep | None, found_dry: bool = False
    ) -> None:
        """Put a mark into the main stream; where that cannot be, the steps on both sides of it are not whole."""
        if self._device.is_capturing() or not self._has_room():
            for spoilt in (step, ending):
                if spoilt is not None:
                    spoilt.is_whole = False
            return
        stream = self.streams.main
        free = self._free.setdefault(stream.device, [])
        event = free.pop() if free else self._device.new_event()
        event.record(stream)
        slots = self._timeline.writer.slots
        group = int(slots[OPEN_GROUP]) if slots[OPEN_OP] else MAX_GROUPS  # of the wait that ends here, still open
        self._marks.append(Mark(event, stream, phase, step, now, found_dry, group))

    def _has_room(self) -> bool:
        if len(self._marks) >= CAPACITY:
            self._read()
        return len(self._marks) < CAPACITY

    def _read(self) -> None:
        """Charge what lies between marks that the device has passed. Not in a capture: asking would end that."""
        marks = self._marks
        if not marks or self._device.is_capturing():
            return
        while len(marks) > 1 and marks[1].event.query():
            self._charge(self._pop(), marks[0])
        if len(marks) == 1 and marks[0].step is None:
            self._pop()

    def _charge(self, first: Mark, second: Mark) -> None:
        step, before = first.step, self._behind
        if step is None or not step.is_whole:
            self._behind = None
            return
        seconds = first.event.elapsed_time(second.event) / 1000
        step.seconds[first.phase] += seconds
        if first.phase == COLLECTIVE_WAIT and second.group < MAX_GROUPS:
            step.group_waits.append((second.group, seconds))
        if second.found_dry:
            self._behind = 0.0
        elif before is not None:
            self._behind = max(0.0, before + seconds - (second.issued - first.issued))
        if before is not None and self._behind is not None and first.phase in MAY_BE_DRY:
            step.behind.append((first.phase, seconds, max(before, self._behind)))
        if second.step is not step:
            self._publish(step)

    def _publish(self, step: MeasuredStep) -> None:
        writer = self._timeline.writer
        slots, length = writer.slots, sum(step.seconds)
        for phase, seconds in enumerate(step.seconds):
            if seconds:
                slots[DEVICE_SECONDS + phase] += seconds
        for group, seconds in step.group_waits:
            slots[GROUP_WAIT + group] += seconds
        for phase, seconds, behind in step.behind:
            if behind <= KEEPS_UP * length:
                slots[DRY_SECONDS + phase] += seconds
        nth = slots[DEVICE_STEPS] + 1
        entry = writer.device_ring[int(nth) % DEVICE_RING_STEPS]
        own = sum(step.seconds[len(PHASES) :])
        others = (step.seconds[OTHER] + own, *step.seconds[OTHER + 1 : len(PHASES)])
        for index, value in enumerate((nth, step.number, step.end, step.sequence, *others)):
            entry[index] = value
        slots[DEVICE_STEPS] = nth  # last: now the entry counts

    def _pop(self) -> Mark:
        mark = self._marks.popleft()
        self._free[mark.stream.device].append(mark.event)
        return mark

    def _restart(self) -> None:
        """Measure from the record's first step on: there may have been another record before."""
        self._forget()
        self._next = self._level = 0

    def _forget(self) -> None:
        self._marks.clear()
        self._free.clear()
        self.streams.forget()
        self._last, self._behind = (0, 0.0), None
        self.measured = self._timeline.on_boundary = None
