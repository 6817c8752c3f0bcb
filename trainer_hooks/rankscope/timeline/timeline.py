"""The training thread's time, cut into phases and steps, written straight into the rank record.

Phases nest and the innermost counts, except that evaluation, checkpoint and start-up absorb what they contain.
Whatever happens, every instant belongs to exactly one phase: the seconds of all phases, with the open one, are
the time since the record began.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from math import inf
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType

from rankscope.record import layout
from rankscope.record.layout import ABSORBS, PASSES_WITHOUT_STEP, PLACES, RING_STEPS, STEP_BOUNDS
from rankscope.record.writer import RankWriter
from rankscope.timeline.checkpoints import CheckpointCounter
from rankscope.timeline.groups import Group, Groups

# The phases that are open: the innermost, and likewise those around it (None: there is none). It never changes, so that
# identity tells whether what `enter` opened is still what is open.
Phases = tuple[int, Any]

# The open phase that absorbs what it contains, and how many are open around it.
Absorber = tuple[int, int]
NOBODY: Absorber = (-1, -1)

NOTHING, BACKWARD_PASS, OPTIMIZER_STEP, SCRIPT = range(len(layout.STEP_MARKERS))

SETTLED_STEPS = 20  # after each of the first ones the looks are taken, later once a second
LOOK_INTERVAL = 1.0  # seconds
NO_BACKWARD = -1  # torch's number of a pass that there is not

OPEN = PLACES["phase"] - PLACES["phase_seconds"]  # in `RankWriter.phase_seconds`
PHASE_SINCE = PLACES["phase_since"]
STEPS = PLACES["steps"]
MICRO_STEPS = PLACES["micro_steps"]
SAMPLES = PLACES["samples"]
TOKENS = PLACES["tokens"]
STEP_SECONDS = PLACES["step_seconds"]
STEP_BUCKETS = PLACES["step_buckets"]
COPIES = slice(2, None)  # of an entry of the ring
COLLECTIVE_DURATION = PLACES["collective_duration_seconds"]
COLLECTIVE_BUS_BYTES = PLACES["collective_bus_bytes"]
OPEN_OP = PLACES["collective_op"]


class Timeline:
    """Phases, steps and collectives of one thread: the main thread, until a step happens on another.

    Events of other threads are ignored, so that the record keeps its single writer. While `on_event` is set the
    record is not published yet: it is at the first event that tells that this process trains.

    It has 29 attributes: CPython 3.11 keeps 30 or more in a slower dictionary.
    """

    def __init__(self, writer: RankWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self.writer = writer
        self.groups = Groups(writer)
        self._on_event: Callable[[int], object] | None = None
        self.on_step: Callable[[float, int], object] | None = None  # with the step's end and the phase that is open
        self.step_marker = NOTHING
        self.looks: list[Callable[[], None]] = []  # called at a step's end, at most once a second: what may cost
        self.seen: dict[str, ReferenceType[Any]] = {}  # objects of the job's by role, for who wants to ask them
        self.autocast = ""  # the type that autocast was last entered with
        self.steps_in_backward = False  # optimizers have stepped in the backward pass that is running
        self._wake_step: int | None = None
        self._on_wake: Callable[[int], int | None] = lambda _: None
        self.clock = clock
        self.restart()

    def __reduce__(self) -> tuple[Any, ...]:
        """A stand-in without anything, as `Guard.__reduce__` explains."""
        return SimpleNamespace, ()

    def restart(self) -> None:
        """Begin again from nothing, in start-up, as the calling process."""
        self._owner: int | None = threading.main_thread().ident
        self._on_boundary: Callable[[int], object] | None = None
        # The outermost is start-up, and OTHER when that ends.
        self.open_phases: Phases = (layout.STARTUP, None)
        self._absorber: Absorber = (layout.STARTUP, 0)
        self.has_started = False
        self.awaited: Any = None  # a synchronous collective that was issued and whose wait comes next (collectives.py)
        self.owner_after_wait: int | None = None  # what `usual_owner` will be again
        self.nested_backwards = 0  # backward passes that run within the one that is a phase
        self.on_backward_end: Callable[[], object] | None = None  # called once when that has ended
        self._settle()
        self.last_event = self._last_step = self.clock()  # when it was, by the clock; and the last step
        self._next_look = self.last_event
        self._bucket = (inf, inf, STEP_BUCKETS)  # of the histogram: its bounds (none is known yet) and its place
        self.fetched_samples = self.fetched_tokens = 0.0  # since the last step: counted when the next one ends
        self.checkpoints = CheckpointCounter(self, self.clock)
        slots = self.writer.slots
        for place in range(layout.SLOTS):
            slots[place] = 0.0
        slots[PLACES["started_monotonic"]] = slots[PHASE_SINCE] = self.last_event
        slots[PLACES["started_unix"]] = time.time()
        self.writer.phase_seconds[OPEN] = layout.STARTUP

    @property
    def on_event(self) -> Callable[[int], object] | None:
        """Called with each phase that is entered."""
        return self._on_event

    @on_event.setter
    def on_event(self, listener: Callable[[int], object] | None) -> None:
        self._on_event = listener
        self._settle()

    @property
    def on_boundary(self) -> Callable[[int], object] | None:
        """Called with each phase that begins, also where one goes on that was interrupted."""
        return self._on_boundary

    @on_boundary.setter
    def on_boundary(self, listener: Callable[[int], object] | None) -> None:
        self._on_boundary = listener
        self._settle()

    def _settle(self) -> None:
        """After a change of what makes an event unusual: a listener, an absorbing phase, another thread."""
        is_usual = self._on_event is None and self._on_boundary is None and self._absorber is NOBODY
        usual_owner = self._owner if is_usual else None
        if self.awaited is None:
            self.usual_owner = usual_owner
        else:
            self.usual_owner, self.owner_after_wait = None, usual_owner

    # The hot path: every probe calls these two, a dozen times a step, each time after the model's own work has emptied
    # the caches (docs/decisions/0016). In them the usual case comes first: the thread that trains, nobody who listens,
    # nothing that absorbs, no wait to come.

    def enter(self, phase: int, on_behalf: bool = False) -> Phases | None:
        """Open `phase` in the training thread; pass what this returns to `leave`: None if that is not done.

        `on_behalf` is for code that runs on another thread while the training thread waits for it.
        """
        if get_ident() != self.usual_owner or ABSORBS[phase]:
            return self._enter_unusually(phase, on_behalf)
        now = self.clock()  # from here on without a call, after which Ctrl-C might come in between
        outer = self.open_phases
        seconds = self.writer.phase_seconds
        seconds[outer[0]] += now - self.last_event
        self.last_event = now
        self.open_phases = opened = (phase, outer)
        seconds[OPEN] = phase
        return opened

    def leave(self, opened: Phases | None) -> float:
        """Close the phase that `enter` opened, and whatever was left open within it.

        Returns the seconds since the last event: of an innermost phase, its whole length. 0 if it was not entered,
        or somebody further out has closed it already.
        """
        inner = self.open_phases
        # One phase within it, as DDP's exposed wait in backward, ends in the same event.
        if opened is None or self.usual_owner is None or (inner is not opened and inner[1] is not opened):
            return self._leave_unusually(opened)
        now = self.clock()  # from here on without a call, as above
        elapsed = now - self.last_event
        seconds = self.writer.phase_seconds
        seconds[inner[0]] += elapsed
        self.last_event = now
        self.open_phases = outer = opened[1]
        seconds[OPEN] = outer[0]
        return elapsed

    def _enter_unusually(self, phase: int, on_behalf: bool) -> Phases | None:
        """`enter` in every case."""
        if self._owner is None or (get_ident() != self._owner and not (on_behalf or self._is_in_our_backward())):
            return None
        if self._on_event is not None:
            self._on_event(phase)
        now = self._pass()
        if self.awaited is not None:
            self._give_up()
        outer = self.open_phases
        self.open_phases = opened = (phase, outer)
        if self._absorber is NOBODY:
            if ABSORBS[phase]:
                self._absorber = phase, len(flat(outer))
            self._open(phase, now)
            self._settle()
            if self._on_boundary is not None:
                self._on_boundary(phase)
        return opened

    def _is_in_our_backward(self) -> bool:
        """Whether the calling thread is the autograd engine's, which runs the backward pass that the owner waits for.

        Of a device's tensors the engine runs it in a thread of its own, made in C++: FSDP's hooks come from there.
        """
        return self.is_within((layout.BACKWARD,)) and runs_backward()

    def _leave_unusually(self, opened: Phases | None) -> float:
        """`leave` in every case."""
        phases, left = flat(self.open_phases), flat(opened)
        depth = len(left) - 1  # how many stay open
        # The outermost is another by now, if start-up ended in between.
        if depth <= 0 or phases[-depth - 1 : -1] != left[:-1]:
            return 0.0
        return self._close(depth)

    def _close(self, depth: int) -> float:
        """Leave only the `depth` outermost phases open. Returns the seconds since the last event."""
        outer = self.open_phases
        for _ in flat(outer)[depth:]:
            outer = outer[1]
        before = self.last_event
        now = self._pass()
        self._forget_awaited()
        self.open_phases = outer  # from here on without a call, after which Ctrl-C might come in between
        if self._absorber[1] >= depth:
            self._absorber = NOBODY
        if self._absorber is NOBODY:
            self._open(outer[0], now)
            self._settle()
            if self._on_boundary is not None:
                self._on_boundary(outer[0])
        return now - before

    def _pass(self) -> float:
        """Charge the time until now to the phase that is open; returns now."""
        now = self.clock()
        self.writer.phase_seconds[self._charged_phase()] += now - self.last_event
        self.last_event = now
        return now

    def _charged_phase(self) -> int:
        """The phase that the time is charged to. No property: compiler.skip_package finds methods only."""
        return self.open_phases[0] if self._absorber is NOBODY else self._absorber[0]

    def _give_up(self) -> None:
        """Nobody waits for the synchronous collective that was issued last: it ended with the last event."""
        self._forget_awaited()
        self.open_phases = self.open_phases[1]
        self._settle()

    def _forget_awaited(self) -> None:
        if self.awaited is not None:
            self.awaited = None
            self.writer.slots[OPEN_OP] = 0.0

    def unwind(self) -> None:
        """Close everything but start-up: what a probe that failed half-way may have left open."""
        self._close(1)
        self.writer.slots[OPEN_OP] = 0.0

    def step(self) -> None:
        """The end of a step, on the thread that trains. The first one ends start-up."""
        if self._owner is None:
            return
        if self._on_event is not None:
            self._on_event(layout.OPTIMIZER)
        self.adopt()
        self._pass()
        self.step_ended()

    def step_ended(self) -> None:
        """The end of a step was the last event, one of the training thread's."""
        now, slots = self.last_event, self.writer.slots
        if not self.has_started:
            self._end_startup(now)
        else:
            seconds = now - self._last_step
            slots[STEP_SECONDS] += seconds
            lowest, highest, place = self._bucket  # the last step's, and nearly always this one's, too
            if not lowest < seconds <= highest:
                place = self._find_bucket(seconds)
            slots[place] += 1
        if self.fetched_samples:
            slots[SAMPLES] += self.fetched_samples
            self.fetched_samples = 0.0
        if self.fetched_tokens:
            slots[TOKENS] += self.fetched_tokens
            self.fetched_tokens = 0.0
        number = slots[STEPS] + 1
        writer = self.writer
        entry = writer.ring[int(number) % RING_STEPS]
        entry[0] = number
        entry[1] = now
        entry[COPIES] = writer.copied
        slots[STEPS] = number  # last: now the entry counts
        self._last_step = now
        if self.groups.unasked:
            self.groups.ask()
        if self.on_step is not None:
            self.on_step(now, self._charged_phase())
        if number == self._wake_step:
            self._wake_step = self._on_wake(int(number))
        if now >= self._next_look:
            self._look(now)

    def _find_bucket(self, seconds: float) -> int:
        number = bisect_left(STEP_BOUNDS, seconds)
        lowest, highest = (0.0, *STEP_BOUNDS, inf)[number : number + 2]
        self._bucket = lowest, highest, STEP_BUCKETS + number
        return STEP_BUCKETS + number

    def is_within(self, phases: Collection[int]) -> bool:
        """Whether one of these phases is open. Usually `open_phases` has but one, which tells without this call."""
        return not set(flat(self.open_phases)).isdisjoint(phases)

    def wake_at(self, step: int, on_wake: Callable[[int], int | None]) -> None:
        """Call `on_wake` with the number of `step` when that has ended; it returns the next step to be called at."""
        self._wake_step, self._on_wake = step, on_wake

    def step_in_backward(self) -> None:
        """The end of a backward pass within which the optimizers stepped."""
        self.steps_in_backward = False
        if self.step_marker <= OPTIMIZER_STEP:
            self.step_marker = OPTIMIZER_STEP
            self.step()

    def unmarked_pass_ended(self) -> None:
        """The end of a backward pass, the last event, while nothing but backward passes can mark steps."""
        if self.micro_steps > PASSES_WITHOUT_STEP:
            self.step_marker = BACKWARD_PASS
            self.step_ended()

    def take_over(self, marker: int) -> bool:
        """Have `marker` mark the steps from now on. Whether this one counts: a backward pass may have marked it."""
        before, self.step_marker = self.step_marker, marker
        return before != BACKWARD_PASS

    def collective_completed(self, op: int, group: Group, duration: float, size: float) -> None:
        """A collective of `size` bytes took `duration` seconds from its issue to its completion.

        Only for those whose duration is known (from the host's clock or from a device's events, read later), so that
        bus bytes divided by duration is their bandwidth.
        """
        slots = self.writer.slots
        slots[COLLECTIVE_DURATION + op] += duration
        slots[COLLECTIVE_BUS_BYTES + op] += size * group.bus_factors[op]

    @property
    def micro_steps(self) -> int:
        """Outermost backward passes so far."""
        return int(self.writer.slots[MICRO_STEPS])

    @property
    def steps(self) -> int:
        """Steps so far."""
        return int(self.writer.slots[STEPS])

    def adopt(self) -> None:
        """Record the calling thread's time from now on, as it is the one that trains."""
        if self._owner is not None:
            self._owner = get_ident()
            self._settle()

    def stop(self) -> None:
        """Ignore every event from now on; ask nothing of the device either, which a forked child may not do."""
        self._owner = self.on_boundary = self.on_step = None

    def _look(self, now: float) -> None:
        if self.steps >= SETTLED_STEPS:
            self._next_look = now + LOOK_INTERVAL
        for look in self.looks:
            look()

    def _end_startup(self, now: float) -> None:
        *within, _ = flat(self.open_phases)
        absorbing = [(phase, len(within) - place) for place, phase in enumerate(within) if ABSORBS[phase]]
        absorber = absorbing[-1] if absorbing else NOBODY  # the outermost
        phases: Phases = (layout.OTHER, None)
        for phase in reversed(within):
            phases = phase, phases
        # From here on without a call, after which Ctrl-C might come in between.
        self.has_started, self.open_phases, self._absorber = True, phases, absorber
        self._open(self._charged_phase(), now)
        self._settle()

    def _open(self, phase: int, now: float) -> None:
        self.writer.phase_seconds[OPEN] = phase
        self.writer.slots[PHASE_SINCE] = now if ABSORBS[phase] else 0.0


def runs_backward() -> bool:
    """Whether the calling thread runs a part of a backward pass and was not made by Python, as a script's are."""
    thread = threading._active.get(get_ident())  # type: ignore[attr-defined]  # noqa: SLF001 - current_thread() would make one
    if thread is not None and not isinstance(thread, threading._DummyThread):  # noqa: SLF001 - its only name
        return False
    return int(sys.modules["torch"]._C._current_graph_task_id()) != NO_BACKWARD  # noqa: SLF001 - torch has no public one


def flat(phases: Phases | None) -> list[int]:
    """Each phase, the innermost first."""
    found = []
    while phases is not None:
        phase, phases = phases
        found.append(phase)
    return found
