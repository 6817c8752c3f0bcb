"""The training thread's time, cut into phases and steps, written straight into the rank record.

Phases nest and the innermost counts, except that evaluation, checkpoint and start-up absorb what they contain.
Whatever happens, every instant belongs to exactly one phase: the seconds of all phases, with the open one, are
the time since the record began.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from threading import get_ident

from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.record import PLACES

Depth = int  # what `enter` returns and `leave` takes: how deep the stack was; -1 for "not entered"

NOBODY = -1

SEQUENCE = PLACES["sequence"]
PHASE = PLACES["phase"]
PHASE_SINCE = PLACES["phase_since"]
PHASE_SECONDS = PLACES["phase_seconds"]
LAST_PROGRESS = PLACES["last_progress"]
STEPS = PLACES["steps"]
STEP_SECONDS = PLACES["step_seconds"]
STEP_BUCKETS = PLACES["step_buckets"]
COLLECTIVES = PLACES["collectives"]
COLLECTIVE_SECONDS = PLACES["collective_seconds"]
COLLECTIVE_BYTES = PLACES["collective_bytes"]


class Timeline:
    """Phases, steps and collectives of one thread: the main thread, until a step happens on another.

    Events of other threads are ignored, so that the record keeps its single writer. While `on_event` is set it
    is called with each phase that is entered: how the record gets published at the first event that tells that
    this process trains.
    """

    def __init__(self, writer: RankWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self.writer = writer
        self.on_event: Callable[[int], None] | None = None
        self.steps_are_explicit = False  # the script calls rankscope.step(): optimizers no longer mark steps
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin again from nothing, in start-up, as the calling process."""
        self._owner: int | None = threading.main_thread().ident
        self._stack = [record.STARTUP]  # the bottom becomes OTHER when start-up ends
        self._entered = [0.0]  # when each of them was opened; nobody leaves the bottom
        self._absorber, self._absorber_depth = record.STARTUP, 0
        self._phase = record.STARTUP
        self._since = self._last_step = self._clock()
        slots = self.writer.slots
        for place in range(record.SLOTS):
            slots[place] = 0.0
        slots[PLACES["started_monotonic"]] = slots[PHASE_SINCE] = slots[LAST_PROGRESS] = self._since
        slots[PLACES["started_unix"]] = time.time()
        slots[PHASE] = record.STARTUP

    # The hot path: `enter`, `leave` and `_open` run ten times a step. Each Python call saved there is a
    # microsecond of every step, because between two steps the caches forget them.

    def enter(self, phase: int, on_behalf: bool = False) -> Depth:
        """Open `phase` in the training thread; pass what this returns to `leave`.

        `on_behalf` is for code that runs on another thread while the training thread waits for it.
        """
        if get_ident() != self._owner and not on_behalf:
            return -1
        if self.on_event is not None:
            self.on_event(phase)
        now = self._clock()
        depth = len(self._stack)
        self._stack.append(phase)
        self._entered.append(now)
        if self._absorber == NOBODY:
            if phase in record.ABSORBING:
                self._absorber, self._absorber_depth = phase, depth
            self._open(phase, now)
        else:
            self.writer.slots[LAST_PROGRESS] = now
        return depth

    def leave(self, depth: Depth) -> float:
        """Close the phase that was opened at `depth`, and whatever was left open within it.

        Returns the seconds since it was opened; 0 if it was not, or somebody further out has closed it already.
        """
        if not 0 < depth < len(self._stack):
            return 0.0
        now = self._clock()
        seconds = now - self._entered[depth]
        del self._stack[depth:], self._entered[depth:]
        if self._absorber_depth >= depth:
            self._absorber, self._absorber_depth = NOBODY, NOBODY
        if self._absorber == NOBODY:
            self._open(self._stack[-1], now)
        else:
            self.writer.slots[LAST_PROGRESS] = now
        return seconds

    def _open(self, phase: int, now: float) -> None:
        """Charge the time since the last change to the phase that was open, and open `phase`."""
        slots = self.writer.slots
        sequence = slots[SEQUENCE]
        slots[SEQUENCE] = sequence + 1
        slots[PHASE_SECONDS + self._phase] += now - self._since
        slots[PHASE] = self._phase = phase
        slots[PHASE_SINCE] = self._since = now
        slots[SEQUENCE] = sequence + 2

    def unwind(self) -> None:
        """Close everything but start-up: what a probe that failed half-way may have left open."""
        self.leave(1)

    def step(self) -> None:
        """The end of a step, on the thread that trains. The first one ends start-up."""
        if self._owner is None:
            return
        if self.on_event is not None:
            self.on_event(record.OPTIMIZER)
        self._owner = get_ident()
        slots = self.writer.slots
        now = self._clock()
        slots[SEQUENCE] += 1
        if slots[STEPS]:
            self._observe_step(now - self._last_step)
        slots[STEPS] += 1
        slots[LAST_PROGRESS] = now
        slots[SEQUENCE] += 1
        self._last_step = now
        if self._stack[0] == record.STARTUP:
            self._end_startup(now)

    def collective(self, op: int, seconds: float, size: float) -> None:
        """Count one collective of `size` bytes that kept the training thread for `seconds`."""
        slots = self.writer.slots
        slots[SEQUENCE] += 1
        slots[COLLECTIVES + op] += 1
        slots[COLLECTIVE_SECONDS + op] += seconds
        slots[COLLECTIVE_BYTES + op] += size
        slots[SEQUENCE] += 1

    def collective_wait(self, op: int, seconds: float) -> None:
        """Charge a wait of `seconds` to a collective that was counted when it was issued."""
        slots = self.writer.slots
        slots[SEQUENCE] += 1
        slots[COLLECTIVE_SECONDS + op] += seconds
        slots[SEQUENCE] += 1

    def stop(self) -> None:
        """Ignore every event from now on."""
        self._owner = None

    def _observe_step(self, seconds: float) -> None:
        slots = self.writer.slots
        slots[STEP_SECONDS] += seconds
        slots[STEP_BUCKETS + bisect_left(record.STEP_BOUNDS, seconds)] += 1

    def _end_startup(self, now: float) -> None:
        self._stack[0] = record.OTHER
        absorbing = ((phase, depth) for depth, phase in enumerate(self._stack) if phase in record.ABSORBING)
        self._absorber, self._absorber_depth = next(absorbing, (NOBODY, NOBODY))
        self._open(self._stack[-1] if self._absorber == NOBODY else self._absorber, now)
