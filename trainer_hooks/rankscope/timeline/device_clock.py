"""The device's time by phase, by events in the training thread's stream that are read once the device has passed them.

On a GPU the host runs ahead, so the host's phases show when work was issued, not how long it took. So an event is
recorded in the training thread's stream at each change of phase. The time between two events is charged to the phase in
which the host issued the work. Single steps are measured like that from start to end, the same ones on every rank
(sampling.py). A step is charged when the device has finished all of it, so that shares are correct even for few steps.

Nothing here waits for the device: `query` shows whether an event is done, and two that are done give the time between
them. A step with an unknown part (a graph capture, no free event), or in which a gradient scaler has skipped others, is
not charged at all.

A host that reads values from the device waits for it at each read. The device has little time of its own in these
waits: until it passes the mark at their start, it still works for the phase before. So only the first few waits of a
step have marks, and further ones are charged to the phase around them. How long the host waits is known anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log2
from typing import Any, Protocol

from rankscope.guard import Guard
from rankscope.record import phases
from rankscope.record.layout import (
    COLLECTIVE_WAIT,
    DEVICE_RING_STEPS,
    DEVICE_WAIT,
    INDEX,
    MAX_GROUPS,
    MAX_PHASES,
    OTHER,
    PHASES,
)
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

# A mark takes up to 10 µs in all (a stream's look-up, a record, a query and a read), and a step has a dozen. With one
# mark every 0.1 s that is 0.01% of the time: all steps of a second and more are measured, of shorter ones about one per
# second. Because the step interval is a power of two, there may be 1.4 times as many marks, or as few.
SECONDS_PER_MARK = 0.1
# Seconds between two measured steps, even of steps with a hundred marks (FSDP): the exporter needs eight compared steps
# to name a slow rank. 100 marks take 0.03% of the time. Steps with more than 300 marks have longer gaps, up to 10 s, so
# that marks take 0.1% of the time, or more only if there are more than 1,000.
USUAL_GAP, LONGEST_GAP = 3.0, 10.0
LEAST_SECONDS_PER_MARK = 0.01
MARKED_WAITS = 4  # waits for the device with marks of their own, per step
MIN_LEVEL_CHANGE = 0.7  # difference between the wanted and the current level before the level changes
# The highest level until the device has passed a measured step: the host may issue a hundred steps in a burst.
FIRST_LEVEL = 4
MIN_SECONDS = 1e-6  # seconds between two steps, in case the clock stands still
UNUSED_STEPS = 64  # steps between two checks whether the job uses the device

# Most marks that the device has not passed yet. A host that runs further ahead (a launch queue holds about a thousand
# kernels) leaves a gap.
CAPACITY = 1024

# If the device has passed the start of one of these phases when it ends, the device is idle.
ISSUES_NOTHING = frozenset(index for index, phase in enumerate(phases.PHASES) if phase.issues_nothing)
# Phases in which an idle device waits for the host to issue work, including the script's own phases.
MAY_BE_DRY = frozenset({*map(PHASES.index, phases.ISSUING), *range(len(PHASES), MAX_PHASES)})
# Ratio of the step by which the device may lag the host and still count as keeping up.
MAX_LAG_RATIO = 0.05


class Event(Protocol):
    """A point in a stream, like torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Record it at the stream's end; it may have been recorded before."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another; the device must have passed both."""


class Device(Protocol):
    """The interface of a device. Streams are hashable, equal if they are the same, and have `device`."""

    def is_in_use(self) -> bool:
        """Return whether the job has initialized it in this process, not in a parent."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph: then an event belongs to the graph."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""

    def new_event(self) -> Event:
        """Return a new event with timing enabled."""


@dataclass(slots=True)
class MeasuredStep:
    """A step, from its first mark until the device has passed its last."""

    skipped_before: float = 0.0  # optimizer steps that a gradient scaler had skipped before it
    is_whole: bool = True  # no part of it is missing
    number: int = 0
    end: float = 0.0
    sequence: float = 0.0
    seconds: list[float] = field(default_factory=lambda: [0.0] * MAX_PHASES)
    group_waits: list[tuple[int, float]] = field(default_factory=list)  # a group's index and the seconds of one wait
    behind: list[tuple[int, float, float]] = field(default_factory=list)
    """Intervals in which the device may have been idle: the phase, for how long at most, its lag behind the host."""


@dataclass(slots=True)
class Mark:
    """An event in a stream: from there on, the device worked for `phase` of `step`, or of no measured step."""

    event: Event
    stream: Any
    phase: int
    step: MeasuredStep | None
    issued: float  # by the host's clock
    waited: float  # seconds for which the host has waited for the device in all
    found_dry: bool = False  # whether the device had finished all work issued before
    group: int = MAX_GROUPS  # index of the collective's group if the mark ends a wait; MAX_GROUPS if unknown


class DeviceClock:
    """Marks the phases of measured steps, and reads the marks later. For the training thread only."""

    def __init__(self, timeline: Timeline, guard: Guard, device: Device) -> None:
        self._timeline = timeline
        self._guarded_step, self._guarded_mark = guard(self.step), guard(self.mark)
        self._guarded_read = guard(self._read)
        self._device = device
        self._marks: deque[Mark] = deque()
        self._free: dict[Any, list[Event]] = {}  # by device: an event stays on the device where it was first recorded
        self.measured: MeasuredStep | None = None  # the current step, if measured
        self._next = self._level = 0  # the next step to measure, and the level of sampling
        self._last = (0, 0.0)  # number and end of the last measured step; first, of the step before
        self._read_step: tuple[int, Mark] | None = None  # the last step that the device has passed: number, last mark
        self._step_seconds: float | None = None  # the device's seconds a step since the one before
        self._count = self._waits = 0  # marks in the measured step, and those that begin a wait for the device
        self.streams = Streams()
        self._behind: float | None = None  # the device's lag behind the host at the last mark read, if known

    def start(self) -> None:
        """Start to decide at the end of each step whether to measure the next one."""
        self._timeline.steps.on_end = self._guarded_step

    def stop(self) -> None:
        """Stop measuring. Marks that the device has not passed yet are dropped."""
        self._timeline.steps.on_end = self._timeline.on_boundary = None
        self._guarded_read()
        self._forget()

    def step(self, now: float, phase: int) -> None:
        """Handle the end of a step at `now` (the host's clock), with `phase` open."""
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
        """Charge the work issued from now on to `phase`."""
        step = self.measured
        if step is None:
            return
        last = self._marks[-1]
        if phase in IDENTIFYING:
            current = self._device.current_stream()
            self.streams.note_stream(current, phase)
            if current != self.streams.main and not self.streams.main_waits:
                return  # FSDP issues collectives on other streams, several per layer
        if phase == last.phase:
            return
        if phase == DEVICE_WAIT:
            if self._waits >= MARKED_WAITS:
                return
            self._waits += 1
        self._count += 1
        found_dry = last.phase in ISSUES_NOTHING and not self._device.is_capturing() and last.event.query()
        self._put(phase, self._timeline.last_event, step, step, found_dry)

    def _begin(self, number: int, now: float, phase: int, ended: MeasuredStep | None) -> None:
        """Measure the step after `number`, or, if that is not possible, the next sampled one."""
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
        self._count, self._waits = 1, 0
        if not self._last[0]:
            self._last = number, now

    def _end(self, step: MeasuredStep, number: int, now: float) -> None:
        slots = self._timeline.writer.slots
        step.number, step.end, step.sequence = number, now, slots[GROUP_COLLECTIVES]
        if slots[SKIPPED] > step.skipped_before:
            step.is_whole = False  # it took as long as several, or minutes while a scaler's scale collapses
        before, ended = self._last
        self._last = number, now
        longest = min(max(USUAL_GAP, self._count * LEAST_SECONDS_PER_MARK), LONGEST_GAP)
        gap = min(self._count * SECONDS_PER_MARK, longest)
        pace = self._step_seconds or (now - ended) / (number - before)
        wanted = log2(max(1.0, gap / max(pace, MIN_SECONDS)))
        if abs(wanted - self._level) > MIN_LEVEL_CHANGE:
            self._level = min(round(wanted), MAX_LEVEL if self._step_seconds else FIRST_LEVEL)
        self._next = next_sampled(number + 1, self._level)

    def _put(
        self, phase: int, now: float, step: MeasuredStep | None, ending: MeasuredStep | None, found_dry: bool = False
    ) -> None:
        """Put a mark into the main stream. If that is not possible, the steps on both sides are incomplete."""
        if self._device.is_capturing() or not self._has_room():
            for incomplete in (step, ending):
                if incomplete is not None:
                    incomplete.is_whole = False
            return
        stream = self.streams.main
        free = self._free.setdefault(stream.device, [])
        event = free.pop() if free else self._device.new_event()
        event.record(stream)
        slots = self._timeline.writer.slots
        group = int(slots[OPEN_GROUP]) if slots[OPEN_OP] else MAX_GROUPS  # of the wait that ends here, still open
        waited = self._timeline.seconds[DEVICE_WAIT]
        self._marks.append(Mark(event, stream, phase, step, now, waited, found_dry, group))

    def _has_room(self) -> bool:
        if len(self._marks) >= CAPACITY:
            self._read()
        return len(self._marks) < CAPACITY

    def _read(self) -> None:
        """Charge the time between marks that the device has passed. Not in a capture, which a query would break."""
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
        issuing = second.issued - first.issued
        if second.found_dry:
            self._behind = 0.0
        elif before is not None:
            self._behind = max(0.0, before + seconds - issuing)
        if before is not None and self._behind is not None and first.phase in MAY_BE_DRY:
            # The device works while the host waits for it, and until it has caught up.
            idle = max(0.0, issuing - max(before, second.waited - first.waited))
            step.behind.append((first.phase, min(idle, seconds), max(before, self._behind)))
        if second.step is not step:
            self._publish(step)
            self._note_pace(step, second)

    def _note_pace(self, step: MeasuredStep, end: Mark) -> None:
        """Take the pace between two read steps by the device, since the host may have issued both in one burst."""
        before, self._read_step = self._read_step, (step.number, end)
        if before is None or before[1].stream.device != end.stream.device:
            self._step_seconds = sum(step.seconds)
        else:
            self._step_seconds = before[1].event.elapsed_time(end.event) / 1000 / (step.number - before[0])
        if before is not None:
            self._free[before[1].stream.device].append(before[1].event)

    def _publish(self, step: MeasuredStep) -> None:
        writer = self._timeline.writer
        slots, length = writer.slots, sum(step.seconds)
        for phase, seconds in enumerate(step.seconds):
            if seconds:
                slots[DEVICE_SECONDS + phase] += seconds
        for group, seconds in step.group_waits:
            slots[GROUP_WAIT + group] += seconds
        for phase, seconds, behind in step.behind:
            if behind <= MAX_LAG_RATIO * length:
                slots[DRY_SECONDS + phase] += seconds
        nth = slots[DEVICE_STEPS] + 1
        entry = writer.device_ring[int(nth) % DEVICE_RING_STEPS]
        own = sum(step.seconds[len(PHASES) :])
        others = (step.seconds[OTHER] + own, *step.seconds[OTHER + 1 : len(PHASES)])
        for index, value in enumerate((nth, step.number, step.end, step.sequence, *others)):
            entry[index] = value
        slots[DEVICE_STEPS] = nth  # last: from now on the entry counts

    def _pop(self) -> Mark:
        mark = self._marks.popleft()
        if self._read_step is None or mark is not self._read_step[1]:
            self._free[mark.stream.device].append(mark.event)
        return mark

    def _restart(self) -> None:
        """Start over with the record's first step: there may have been another record before."""
        self._forget()
        self._next = self._level = 0

    def _forget(self) -> None:
        self._marks.clear()
        self._free.clear()
        self.streams.forget()
        self._last, self._behind = (0, 0.0), None
        self._read_step = self._step_seconds = None
        self.measured = self._timeline.on_boundary = None
