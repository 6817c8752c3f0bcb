"""Accelerate's `dispatch_batches`: one rank fetches the batches of all ranks, and each rank gets its part.

So each rank counts its part, not what the one rank fetches. The loader's `__iter__` is a generator, which must be
watched before it starts. Each such loader makes a DataLoader first, so that is the time to patch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from rankscope.guard import Guard
from rankscope.patch import Patches, Undo, replace
from rankscope.probes.data_wait import BatchCounter
from rankscope.probes.span import Function, in_phase
from rankscope.probes.timed_iterator import timed_iterator
from rankscope.record import layout
from rankscope.timeline.timeline import Timeline


class Dispatchers:
    """The patch of the class of these loaders, made once the class is imported."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._guard = guard
        counter = BatchCounter(timeline)

        watch = in_phase(
            timeline,
            guard,
            layout.DATA_WAIT,
            lambda call, batch: counter.note(call[0], batch),
            missed=lambda call, batch: counter.note_elsewhere(call[0], batch),
        )
        self._fetch = watch(lambda _iterator, ask: ask())
        self._patches = Patches()
        self.remove = self._patches.undo

    def poll(self) -> None:
        """Patch the class at the first poll after its import."""
        dispatcher = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
        if dispatcher is not None:
            self._patches.add(dispatcher, "__iter__", self._watch)

    def _watch(self, original: Function) -> Function:
        def watched(loader: Any) -> Any:
            iterator = original(loader)
            return iterator if self._guard.disabled else timed_iterator(iterator, self._fetch)

        return watched


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Look for the class whenever a DataLoader is made."""
    dispatchers = Dispatchers(timeline, guard)
    poll = guard(dispatchers.poll)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> None:
            poll()
            original(*args, **kwargs)

        return watched

    return [dispatchers.remove, replace(DataLoader, "__init__", wrap)]
