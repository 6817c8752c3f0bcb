"""Garbage collection: how often Python's cyclic collector ran, and how long it held every thread up."""

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

    It runs on whatever thread the collection happens to start on, and writes there: no two collections overlap (the
    interpreter refuses a second one until the callbacks of the first have returned) and nobody else writes these
    slots, so they too have a single writer at a time.
    """

    def __init__(self, timeline: Timeline, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self._guard = guard
        self._clock = clock
        self._began = clock()
        self._is_open = False  # the first callback may be the stop of a collection that began before us

    def __call__(self, moment: str, info: dict[str, int]) -> None:
        """A collection starts or stops, as `moment` says; `info` has its generation."""
        if self._guard.blown:
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
            self._guard.blow(error)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Join the collector's callbacks."""
    counter = PauseCounter(timeline, guard)
    gc.callbacks.append(counter)

    def leave() -> None:
        if counter in gc.callbacks:  # somebody else may have emptied the list
            gc.callbacks.remove(counter)

    return [leave]
