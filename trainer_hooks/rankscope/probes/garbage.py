"""Garbage collection: runs of Python's cyclic collector, and how long they paused all threads."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.record.layout import GC_GENERATIONS, INDEX
from rankscope.timeline.timeline import Timeline

COLLECTIONS = INDEX["gc_collections"]
SECONDS = INDEX["gc_seconds"]


class PauseCounter:
    """The callback of the collector.

    It runs and writes on the thread that starts the collection. Collections do not overlap (the interpreter starts none
    until the callbacks of the last have returned), and no other code writes these slots. So they have a single writer
    at a time, like all slots.
    """

    def __init__(self, timeline: Timeline, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self._guard = guard
        self._clock = clock
        self._began = clock()
        self._is_open = False  # the first callback may be the stop of a collection that began earlier

    def __call__(self, moment: str, info: dict[str, int]) -> None:
        """Handle the start or stop of a collection, as `moment` says; `info` has its generation."""
        if self._guard.disabled:
            return
        try:
            now = self._clock()
            if moment == "start":
                self._began, self._is_open = now, True
            elif self._is_open:
                self._is_open = False
                slots, generation = self._timeline.writer.slots, info["generation"]
                if generation < GC_GENERATIONS:
                    slots[COLLECTIONS + generation] += 1
                    slots[SECONDS + generation] += now - self._began
        except BaseException as error:
            self._guard.handle(error)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Add the counter to the collector's callbacks."""
    counter = PauseCounter(timeline, guard)
    gc.callbacks.append(counter)

    def leave() -> None:
        if counter in gc.callbacks:  # other code may have emptied the list
            gc.callbacks.remove(counter)

    return [leave]
