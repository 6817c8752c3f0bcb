"""The phases of the training thread's time: which are open, and to which of them the time is charged.

Phases nest and the innermost counts, except that evaluation, checkpoint and start-up absorb what they contain.
Whatever happens, every instant belongs to exactly one phase: the seconds of all phases, with the open one, are
the time since the record began.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any

from rankscope.record import layout
from rankscope.record.layout import ABSORBS, INDEX
from rankscope.record.writer import RankWriter

# The phases that are open: the innermost, and likewise those around it (None: there is none). It never changes, so that
# identity tells whether what `enter` opened is still what is open.
Phases = tuple[int, Any]

# The open phase that absorbs what it contains, and how many are open around it.
Absorber = tuple[int, int]
NOBODY: Absorber = (-1, -1)

# Of a phase that stays open for the wait that comes next: what names that wait, and what whoever waits gets then.
Kept = tuple[int | None, Any]

NO_BACKWARD = -1  # torch's number of a pass that there is not

OPEN = INDEX["phase"] - INDEX["phase_seconds"]  # in `RankWriter.phase_seconds`
PHASE_SINCE = INDEX["phase_since"]
OPEN_OP = INDEX["collective_op"]


class PhaseClock:
    """Charges the time of one thread to the phase that is open in it; the events of other threads are ignored.

    Nothing is charged until `restart` has been called. `clock` gives seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, writer: RankWriter, clock: Callable[[], float]) -> None:
        self.writer = writer
        writer.on_move = self._find_slots
        self._find_slots()
        self.clock = clock
        self._on_event: Callable[[int], object] | None = None
        # Called with a phase that begins on another thread; returns whether that is the one to follow from now on.
        self.follows: Callable[[int], bool] = lambda _phase: False

    def _find_slots(self) -> None:
        """Keep what the fast path writes into."""
        writer = self.writer
        self.slots, self.seconds = writer.slots, writer.phase_seconds
        self.copied, self.ring = writer.copied, writer.ring

    def restart(self) -> None:
        """Begin again, in start-up, as the calling process."""
        self._owner: int | None = threading.main_thread().ident
        self._on_boundary: Callable[[int], object] | None = None
        # The outermost is start-up, and OTHER when that ends.
        self.open_phases: Phases = (layout.STARTUP, None)
        self._absorber: Absorber = (layout.STARTUP, 0)
        self._kept: Kept | None = None  # what `keep_open` was given, until its wait comes
        self._owner_after_wait: int | None = None  # what `usual_owner` will be again
        self._find_usual_owner()
        self.last_event = self.clock()  # when it was
        self.slots[PHASE_SINCE] = self.last_event
        self.seconds[OPEN] = layout.STARTUP

    @property
    def on_event(self) -> Callable[[int], object] | None:
        """Called with each phase that is entered."""
        return self._on_event

    @on_event.setter
    def on_event(self, listener: Callable[[int], object] | None) -> None:
        self._on_event = listener
        self._find_usual_owner()

    @property
    def on_boundary(self) -> Callable[[int], object] | None:
        """Called with each phase that begins, also where one goes on that was interrupted."""
        return self._on_boundary

    @on_boundary.setter
    def on_boundary(self, listener: Callable[[int], object] | None) -> None:
        self._on_boundary = listener
        self._find_usual_owner()

    def _find_usual_owner(self) -> None:
        """After a change of what makes an event unusual: a listener, an absorbing phase, another thread."""
        is_usual = self._on_event is None and self._on_boundary is None and self._absorber is NOBODY
        usual_owner = self._owner if is_usual else None
        if self._kept is None:
            self.usual_owner = usual_owner
        else:
            self.usual_owner, self._owner_after_wait = None, usual_owner

    # The fast path: every probe calls these two, a dozen times a step, each time after the model's own work has emptied
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
        self.seconds[outer[0]] += now - self.last_event
        self.last_event = now
        self.open_phases = opened = (phase, outer)
        self.seconds[OPEN] = phase
        return opened

    def leave(self, opened: Phases | None) -> None:
        """Close the phase that `enter` opened, and whatever was left open within it.

        Nothing is done if it was not entered, or somebody further out has closed it already.
        """
        inner = self.open_phases
        # One phase within it, as DDP's exposed wait in backward, ends in the same event.
        if self.usual_owner is None or (inner is not opened and (opened is None or inner[1] is not opened)):
            self._leave_unusually(opened)
            return
        now = self.clock()  # from here on without a call, as above
        self.seconds[inner[0]] += now - self.last_event
        self.last_event = now
        self.open_phases = outer = opened[1]
        self.seconds[OPEN] = outer[0]

    def _enter_unusually(self, phase: int, on_behalf: bool) -> Phases | None:
        """`enter` where anything is unusual: it asks for each case in turn."""
        if phase == layout.BACKWARD and self.open_phases == (layout.STARTUP, None):
            self.adopt()  # some frameworks train on a thread of their own
        if self._owner is None:
            return None
        if get_ident() != self._owner and not (on_behalf or self._is_in_our_backward() or self.follows(phase)):
            return None
        if self._on_event is not None:
            self._on_event(phase)
        now = self._pass()
        if self._kept is not None:
            self._give_up()
        outer = self.open_phases
        self.open_phases = opened = (phase, outer)
        if self._absorber is NOBODY:
            if ABSORBS[phase]:
                self._absorber = phase, len(flat(outer))
            self._open(phase, now)
            self._find_usual_owner()
            if self._on_boundary is not None:
                self._on_boundary(phase)
        return opened

    def _is_in_our_backward(self) -> bool:
        """Whether the calling thread is the autograd engine's, which runs the backward pass that the owner waits for.

        Of a device's tensors the engine runs it in a thread of its own, made in C++: FSDP's hooks come from there.
        """
        return self.is_within((layout.BACKWARD,)) and runs_backward()

    def _leave_unusually(self, opened: Phases | None) -> None:
        """`leave` of any open phase, however many are open within it, and of one that is closed already."""
        phases, left = flat(self.open_phases), flat(opened)
        depth = len(left) - 1  # how many stay open
        # The outermost is another by now, if start-up ended in between.
        if depth > 0 and phases[-depth - 1 : -1] == left[:-1]:
            self._close(depth)

    def _close(self, depth: int) -> None:
        """Leave only the `depth` outermost phases open."""
        outer = self.open_phases
        for _ in flat(outer)[depth:]:
            outer = outer[1]
        now = self._pass()
        self._forget_kept()
        self.open_phases = outer  # from here on without a call, after which Ctrl-C might come in between
        if self._absorber[1] >= depth:
            self._absorber = NOBODY
        if self._absorber is NOBODY:
            self._open(outer[0], now)
            self._find_usual_owner()
            if self._on_boundary is not None:
                self._on_boundary(outer[0])

    def _pass(self) -> float:
        """Charge the time until now to the phase that is open; returns now."""
        now = self.clock()
        self.seconds[self.charged_phase()] += now - self.last_event
        self.last_event = now
        return now

    def charged_phase(self) -> int:
        """The phase that the time is charged to. No property: compiler.skip_package finds methods only."""
        return self.open_phases[0] if self._absorber is NOBODY else self._absorber[0]

    def _give_up(self) -> None:
        """Nobody waits for the synchronous collective that was issued last: it ended with the last event."""
        self._forget_kept()
        self.open_phases = self.open_phases[1]
        self._find_usual_owner()

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept = None
            self.slots[OPEN_OP] = 0.0

    def keep_open(self, key: int | None, wait: Any) -> bool:
        """Leave the innermost phase open for the wait that `key` names and that comes next; `wait` is kept for it.

        Whether that is done. Whatever else comes next ends the phase.
        """
        if self.usual_owner is None:
            return False
        self._kept = key, wait
        self._owner_after_wait, self.usual_owner = self.usual_owner, None
        return True

    def resume(self, key: int) -> Any:
        """What was kept for the wait that `key` names, and that begins now in the open phase; None if nothing was."""
        kept = self._kept
        if kept is None or kept[0] != key:
            return None
        self._kept = None
        self.usual_owner = self._owner_after_wait
        return kept[1]

    def unwind(self) -> None:
        """Close everything but start-up: what a probe that failed half-way may have left open."""
        self._find_slots()  # Ctrl-C may have come while the record moved
        self._close(1)
        self.slots[OPEN_OP] = 0.0

    def end_startup(self) -> None:
        """Start-up ended with the last event. What is open within it goes on."""
        *within, _ = flat(self.open_phases)
        absorbing = [(phase, len(within) - depth) for depth, phase in enumerate(within) if ABSORBS[phase]]
        absorber = absorbing[-1] if absorbing else NOBODY  # the outermost
        phases: Phases = (layout.OTHER, None)
        for phase in reversed(within):
            phases = phase, phases
        # From here on without a call, after which Ctrl-C might come in between.
        self.open_phases, self._absorber = phases, absorber
        self._open(self.charged_phase(), self.last_event)
        self._find_usual_owner()

    def is_within(self, phases: Collection[int]) -> bool:
        """Whether one of these phases is open. Usually `open_phases` has but one, which tells without this call."""
        opened: Phases | None = self.open_phases
        while opened is not None:
            phase, opened = opened
            if phase in phases:
                return True
        return False

    def adopt(self) -> None:
        """Record the calling thread's time from now on, as it is the one that trains."""
        thread = get_ident()
        if self._owner not in (None, thread):
            self._owner = thread
            self._find_usual_owner()

    def stop(self) -> None:
        """Ignore every event from now on."""
        self._owner = self.on_boundary = None

    def _open(self, phase: int, now: float) -> None:
        self.seconds[OPEN] = phase
        self.slots[PHASE_SINCE] = now if ABSORBS[phase] else 0.0


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
