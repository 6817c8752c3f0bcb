"""Counting of checkpoints: their number, their sizes, and how long they blocked the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from rankscope.record import layout
from rankscope.record.clock import renew_unix_times
from rankscope.record.layout import INDEX
from rankscope.timeline.phases import PhaseClock, Phases

STEPS = INDEX["steps"]
CHECKPOINTS = INDEX["checkpoints"]
BYTES = INDEX["checkpoint_bytes"]
LAST_SECONDS = INDEX["checkpoint_last_seconds"]
LAST_BYTES = INDEX["checkpoint_last_bytes"]
LAST_UNIX = INDEX["checkpoint_last_unix"]

NO_STEP = -1.0


class CheckpointCounter:
    """Counts the saves of one timeline's thread.

    A nested save does not count twice. Consecutive saves between the same two steps count as one checkpoint: a script
    may save model, optimizer and scheduler in separate files.
    """

    def __init__(self, phases: PhaseClock) -> None:
        self._phases = phases
        self.restart()

    def restart(self) -> None:
        """Forget the saves of the process that this one was forked from."""
        self._open = 0
        self._began = 0.0
        self._bytes = 0.0  # of the saves nested in the outermost one
        self._last_step = NO_STEP

    def begin(self) -> Phases | None:
        """Begin a save. Pass the result to `end`."""
        opened = self._phases.enter(layout.CHECKPOINT)
        if opened:
            if self._open == 0:
                self._began, self._bytes = self._phases.clock(), 0.0
            self._open += 1
        return opened

    def end(self, opened: Phases | None, size: float | None) -> None:
        """End a save of `size` bytes: 0 if not known, None if it was not a checkpoint or failed."""
        self._phases.leave(opened)
        if not opened:
            return
        self._open -= 1
        if size is None:
            return
        if self._open:
            self._bytes += size
        else:
            self.count(size or self._bytes, self._phases.clock() - self._began, time.time())

    def count_later(self) -> Callable[[float, float], None]:
        """Return a function to call with bytes and unix time when the open save has finished in the background.

        The save counts then, unless it is nested in another one, which counts by itself.
        """
        seconds, is_nested = self._phases.clock() - self._began, self._open > 1

        def count(size: float, unix: float) -> None:
            slots = self._phases.writer.slots
            slots[BYTES] += size
            renew_unix_times(slots, time.time(), self._phases.clock())
            slots[LAST_UNIX] = unix
            if is_nested:
                slots[LAST_BYTES] += size
                return
            slots[CHECKPOINTS] += 1
            slots[LAST_SECONDS], slots[LAST_BYTES] = seconds, size
            self._last_step = NO_STEP

        return count

    def count(self, size: float, seconds: float, unix: float) -> None:
        """Count a save of `size` bytes, finished at the time `unix`, that has blocked the thread for `seconds`."""
        slots = self._phases.writer.slots
        if slots[STEPS] == self._last_step:
            slots[LAST_SECONDS] += seconds
            slots[LAST_BYTES] += size
        else:
            self._last_step = slots[STEPS]
            slots[CHECKPOINTS] += 1
            slots[LAST_SECONDS], slots[LAST_BYTES] = seconds, size
        slots[BYTES] += size
        renew_unix_times(slots, time.time(), self._phases.clock())
        slots[LAST_UNIX] = unix
