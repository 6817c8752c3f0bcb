"""The open phases of the training thread, and the charging of time to them.

Phases nest, and time is charged to the innermost one, except that evaluation, checkpoint and startup absorb what they
contain. Every instant belongs to exactly one phase: the seconds of all phases, including the open one, sum to the time
since the start of the record.
"""

from __future__ import annotations

import concurrent.futures.thread
import selectors
import sys
import threading
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import ABSORBS, INDEX
from rankscope.record.writer import RankWriter
from rankscope.timeline.task_phases import TaskPhases

# The open phases as a linked list: the innermost, and the tuple of those around it (or None). Tuples are immutable, so
# identity shows whether the phase that `enter` opened is still the innermost.
Phases = tuple[int, Any]

# The open phase that absorbs what it contains, and the number of open phases around it.
Absorber = tuple[int, int]
NO_ABSORBER: Absorber = (-1, -1)

# A phase kept open for the next wait: the key of that wait, and the value that the wait gets.
Kept = tuple[int | None, Any]

WAITING_MODULES = (threading, concurrent.futures.thread, concurrent.futures._base, selectors)  # noqa: SLF001 - no public name
# Of the code in which a thread waits for another one: locks, futures and queues, thread pools, event loops.
WAITING_FILES = frozenset(str(module.__file__) for module in WAITING_MODULES)

NO_BACKWARD = -1  # torch's graph task ID outside a backward pass

OPEN = INDEX["phase"] - INDEX["phase_seconds"]  # in `RankWriter.phase_seconds`
PHASE_SINCE = INDEX["phase_since"]
OPEN_OP = INDEX["collective_op"]


class PhaseClock:
    """Charges the time of one thread to its open phase. Events of other threads are ignored.

    Nothing is charged until `restart` has been called. `clock` gives seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, writer: RankWriter, clock: Callable[[], float]) -> None:
        self.writer = writer
        writer.on_move = self._find_slots
        self._find_slots()
        self.clock = clock
        self._on_event: Callable[[int], object] | None = None
        self.tasks = TaskPhases(self)
        # Called with a phase that starts on another thread; returns whether to follow that thread from now on.
        self.follows: Callable[[int], bool] = lambda _phase: False
        self.on_adopt: Callable[[], object] = lambda: None  # called when another thread is followed from now on

    def _find_slots(self) -> None:
        """Keep the slots that the fast path writes."""
        writer = self.writer
        self.slots, self.seconds = writer.slots, writer.phase_seconds
        self.copied, self.ring = writer.copied, writer.ring

    def restart(self) -> None:
        """Start over in the calling process, in the phase startup."""
        self._owner: int | None = threading.main_thread().ident
        self._on_boundary: Callable[[int], object] | None = None
        # The outermost phase is startup, and later OTHER.
        self.open_phases: Phases = (layout.STARTUP, None)
        self._absorber: Absorber = (layout.STARTUP, 0)
        self.tasks.restart()
        self._kept: Kept | None = None  # the argument of `keep_open`, until its wait
        self._owner_after_wait: int | None = None  # value of `usual_owner` after that wait
        self.find_usual_owner()
        self.last_event = self.clock()
        self.slots[PHASE_SINCE] = self.last_event
        self.seconds[OPEN] = layout.STARTUP

    @property
    def on_event(self) -> Callable[[int], object] | None:
        """A listener that is called with each entered phase."""
        return self._on_event

    @on_event.setter
    def on_event(self, listener: Callable[[int], object] | None) -> None:
        self._on_event = listener
        self.find_usual_owner()

    @property
    def on_boundary(self) -> Callable[[int], object] | None:
        """A listener that is called with each phase that starts or resumes."""
        return self._on_boundary

    @on_boundary.setter
    def on_boundary(self, listener: Callable[[int], object] | None) -> None:
        self._on_boundary = listener
        self.find_usual_owner()

    def find_usual_owner(self) -> None:
        """Update `usual_owner` after a change of the listeners, the absorbing phase or the thread."""
        has_listener = self._on_event is not None or self._on_boundary is not None
        is_usual = not has_listener and self._absorber is NO_ABSORBER and not self.tasks.open
        usual_owner = self._owner if is_usual else None
        if self._kept is None:
            self.usual_owner = usual_owner
        else:
            self.usual_owner, self._owner_after_wait = None, usual_owner

    # The fast path: every probe calls these two, a dozen times a step, each time after the model's own work has emptied
    # the caches (docs/decisions/0016). The usual case comes first: the training thread, no listener, no absorbing
    # phase, no kept wait.

    def enter(self, phase: int, on_behalf: bool = False) -> Phases | None:
        """Open `phase` in the training thread. Pass the result to `leave`; it is None if the phase was not opened.

        `on_behalf` is for code on another thread for which the training thread waits.
        """
        if get_ident() != self.usual_owner or ABSORBS[phase]:
            return self._enter_slow_path(phase, on_behalf)
        now = self.clock()  # no call from here on, because Ctrl-C may be raised after a call
        outer = self.open_phases
        self.seconds[outer[0]] += now - self.last_event
        self.last_event = now
        self.open_phases = opened = (phase, outer)
        self.seconds[OPEN] = phase
        return opened

    def leave(self, opened: Phases | None) -> None:
        """Close the phase that `enter` opened, and all phases left open in it.

        Does nothing if it was not opened or is closed already.
        """
        inner = self.open_phases
        # One phase inside it, such as DDP's exposed wait in backward, ends with the same event.
        if self.usual_owner is None or (inner is not opened and (opened is None or inner[1] is not opened)):
            self._leave_slow_path(opened)
            return
        now = self.clock()  # no call from here on, as above
        self.seconds[inner[0]] += now - self.last_event
        self.last_event = now
        self.open_phases = outer = opened[1]
        self.seconds[OPEN] = outer[0]

    def _enter_slow_path(self, phase: int, on_behalf: bool) -> Phases | None:
        """Do what `enter` does, in all other cases."""
        if phase == layout.BACKWARD and self.open_phases == (layout.STARTUP, None):
            self.adopt()  # some frameworks train on their own thread
        if self._owner is None:
            return None
        if get_ident() != self._owner and not (on_behalf or self._is_in_our_backward() or self.follows(phase)):
            return None
        if self._on_event is not None:
            self._on_event(phase)
        if self.tasks.open:
            self.tasks.switch()
        self._pass()
        if self._kept is not None:
            self._close_kept()
        return self.reopen(phase)

    def reopen(self, phase: int) -> Phases:
        """Open `phase` at the last event."""
        outer = self.open_phases
        self.open_phases = opened = (phase, outer)
        if self._absorber is NO_ABSORBER:
            if ABSORBS[phase]:
                self._absorber = phase, len(flatten(outer))
            self._open(phase, self.last_event)
            self.find_usual_owner()
            if self._on_boundary is not None:
                self._on_boundary(phase)
        return opened

    def _is_in_our_backward(self) -> bool:
        """Return whether the calling thread is the autograd engine's and runs the owner's backward pass.

        For a device's tensors the engine uses its own thread, made in C++. FSDP's hooks run there.
        """
        return self.is_within((layout.BACKWARD,)) and runs_backward()

    def _leave_slow_path(self, opened: Phases | None) -> None:
        """Do what `leave` does, with any number of phases open inside, or if it is closed already."""
        phases, left = flatten(self.open_phases), flatten(opened)
        depth = len(left) - 1  # number of phases that stay open
        # The outermost phase has changed if startup ended in between.
        if depth > 0 and phases[-depth - 1 : -1] == left[:-1]:
            self.close(depth)

    def close(self, depth: int) -> None:
        """Close all phases but the `depth` outermost ones."""
        outer = self.open_phases
        for _ in flatten(outer)[depth:]:
            outer = outer[1]
        now = self._pass()
        self._forget_kept()
        self.open_phases = outer  # no call from here on, because Ctrl-C may be raised after a call
        if self._absorber[1] >= depth:
            self._absorber = NO_ABSORBER
        if self._absorber is NO_ABSORBER:
            self._open(outer[0], now)
            self.find_usual_owner()
            if self._on_boundary is not None:
                self._on_boundary(outer[0])

    def _pass(self) -> float:
        """Charge the time until now to the open phase. Returns the current time."""
        now = self.clock()
        self.seconds[self.charged_phase()] += now - self.last_event
        self.last_event = now
        return now

    def charged_phase(self) -> int:
        """Return the phase that time is charged to. Not a property: compiler.skip_package finds only methods."""
        return self.open_phases[0] if self._absorber is NO_ABSORBER else self._absorber[0]

    def _close_kept(self) -> None:
        """Close the phase kept open for a wait that did not come: the collective ended with the last event."""
        self._forget_kept()
        self.open_phases = self.open_phases[1]
        self.find_usual_owner()

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept = None
            self.slots[OPEN_OP] = 0.0

    def keep_open(self, key: int | None, wait: Any) -> bool:
        """Keep the innermost phase open for the next wait, if its key is `key`, and keep `wait` for it.

        Returns whether that is done. Any other event ends the phase.
        """
        if self.usual_owner is None:
            return False
        self._kept = key, wait
        self._owner_after_wait, self.usual_owner = self.usual_owner, None
        return True

    def resume(self, key: int) -> Any:
        """Return the value kept for the wait `key`, which continues in the open phase; None if there is none."""
        kept = self._kept
        if kept is None or kept[0] != key:
            return None
        self._kept = None
        self.usual_owner = self._owner_after_wait
        return kept[1]

    def unwind(self) -> None:
        """Close all phases that a failed probe may have left open."""
        self.tasks.restart()
        self._find_slots()  # Ctrl-C may have come while the record moved
        self.close(1)
        self.slots[OPEN_OP] = 0.0

    def end_startup(self) -> None:
        """End startup at the last event. Phases open inside it go on."""
        *within, _ = flatten(self.open_phases)
        absorbing = [(phase, len(within) - depth) for depth, phase in enumerate(within) if ABSORBS[phase]]
        absorber = absorbing[-1] if absorbing else NO_ABSORBER  # the outermost
        phases: Phases = (layout.OTHER, None)
        for phase in reversed(within):
            phases = phase, phases
        # No call before the next line, because Ctrl-C may be raised after a call.
        self.open_phases, self._absorber = phases, absorber
        self._open(self.charged_phase(), self.last_event)
        self.find_usual_owner()

    def is_within(self, phases: Collection[int]) -> bool:
        """Return whether one of these phases is open. Usually only one phase is open, and callers skip this call."""
        if self.tasks.open:
            self.tasks.switch()
        opened: Phases | None = self.open_phases
        while opened is not None:
            phase, opened = opened
            if phase in phases:
                return True
        return False

    @property
    def owner(self) -> int | None:
        """The thread whose time is charged; None if there is none."""
        return self._owner

    @property
    def is_waiting_for_thread(self) -> bool:
        """True if no phase is open and the followed thread has ended or waits for another one. Takes about 10 µs."""
        if self.open_phases[1] is not None or self._owner is None:
            return False
        frame = sys._current_frames().get(self._owner)  # noqa: SLF001 - the documented name
        return frame is None or frame.f_code.co_filename in WAITING_FILES

    def adopt(self) -> int | None:
        """Record the calling thread's time from now on, because it trains. Return the thread followed before."""
        before, thread = self._owner, get_ident()
        if before not in (None, thread):
            self._owner = thread
            self.find_usual_owner()
            self.on_adopt()
        return before

    def stop(self) -> None:
        """Ignore every event from now on."""
        self._owner = self.on_boundary = None

    def _open(self, phase: int, now: float) -> None:
        self.seconds[OPEN] = phase
        self.slots[PHASE_SINCE] = now if ABSORBS[phase] else 0.0


def runs_backward() -> bool:
    """Return whether the calling thread runs part of a backward pass and was not made by Python."""
    thread = threading._active.get(get_ident())  # type: ignore[attr-defined]  # noqa: SLF001 - current_thread() would create one
    if thread is not None and not isinstance(thread, threading._DummyThread):  # noqa: SLF001 - no public API
        return False
    return int(sys.modules["torch"]._C._current_graph_task_id()) != NO_BACKWARD  # noqa: SLF001 - no public API


def flatten(phases: Phases | None) -> list[int]:
    """Return all phases, the innermost first."""
    found = []
    while phases is not None:
        phase, phases = phases
        found.append(phase)
    return found
