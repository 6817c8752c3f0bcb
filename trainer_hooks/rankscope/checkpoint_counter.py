"""Counts checkpoints: how many, how large, and how long each kept the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope import record
from rankscope.record import PLACES

if TYPE_CHECKING:
    from rankscope.timeline import Depth, Timeline

STEPS = PLACES["steps"]
CHECKPOINTS = PLACES["checkpoints"]
BYTES = PLACES["checkpoint_bytes"]
LAST_SECONDS = PLACES["checkpoint_last_seconds"]
LAST_BYTES = PLACES["checkpoint_last_bytes"]
LAST_UNIX = PLACES["checkpoint_last_unix"]

NO_STEP = -1.0


class CheckpointCounter:
    """The saves of one timeline's thread.

    A save within a save counts once. So does what is saved one after the other between the same two steps: model,
    optimizer and scheduler in files of their own are one checkpoint.
    """

    def __init__(self, timeline: Timeline, clock: Callable[[], float]) -> None:
        self._timeline = timeline
        self._clock = clock
        self._open = 0
        self._began = 0.0
        self._bytes = 0.0  # of the saves within the outermost one
        self._last_step = NO_STEP

    @property
    def is_nested(self) -> bool:
        """Whether the innermost open save lies within another."""
        return self._open > 1

    @property
    def elapsed(self) -> float:
        """Seconds since the outermost open save began."""
        return self._clock() - self._began

    def begin(self) -> Depth:
        """A save begins; pass what this returns to `end`."""
        depth = self._timeline.enter(record.CHECKPOINT)
        if depth > 0:
            if self._open == 0:
                self._began, self._bytes = self._clock(), 0.0
            self._open += 1
        return depth

    def end(self, depth: Depth, size: float | None) -> None:
        """A save ended that wrote `size` bytes: 0 if that is not known, None if it was no checkpoint or failed."""
        self._timeline.leave(depth)
        if depth <= 0:
            return
        self._open -= 1
        if size is None:
            return
        if self._open:
            self._bytes += size
        else:
            self._count(size or self._bytes)

    def finished_later(self, seconds: float, size: float, unix: float) -> None:
        """A save that went on in the background after it had kept the thread for `seconds` is finished."""
        slots = self._timeline.writer.slots
        slots[CHECKPOINTS] += 1
        slots[BYTES] += size
        slots[LAST_SECONDS], slots[LAST_BYTES], slots[LAST_UNIX] = seconds, size, unix
        self._last_step = NO_STEP

    def _count(self, size: float) -> None:
        slots = self._timeline.writer.slots
        seconds = self.elapsed
        if slots[STEPS] == self._last_step:
            slots[LAST_SECONDS] += seconds
            slots[LAST_BYTES] += size
        else:
            self._last_step = slots[STEPS]
            slots[CHECKPOINTS] += 1
            slots[LAST_SECONDS], slots[LAST_BYTES] = seconds, size
        slots[BYTES] += size
        slots[LAST_UNIX] = time.time()
