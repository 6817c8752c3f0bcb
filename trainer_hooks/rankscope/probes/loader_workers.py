"""Loader workers: for how much of the time they make batches, by their own clocks.

Data wait tells that a batch came late, not which loader is slow: batches that are loaded ahead let ranks whose loaders
are nearly as slow never wait. The share of time that a loader's workers are at work is how near it is to that.

A worker that is forked writes into memory that it shares with the rank; one that is spawned has none and is not seen.
torchdata's StatefulDataLoader has iterators and a worker loop of its own, which are watched once it is in use. The end
of a loader's workers is data wait, as their start is.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import _utils, dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.data_wait import LOADER
from rankscope.probes.span import Function, in_phase
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

WORKING = INDEX["loader_worker_seconds"]
IDLE = WORKING + layout.LOADER_WORKER_STATES.index("idle")

CLOCK_ENTRIES = 512  # an entry is used again when so many workers have been started since

TORCHDATA = "torchdata.stateful_dataloader"
DATA_WAIT = frozenset({layout.DATA_WAIT})


class WorkerClock:
    """What the workers write: seconds, an entry each. A process has its own, as ranks may be forked from it."""

    def __init__(self) -> None:
        self._owner = 0  # the process whose workers write here
        self._first = 0  # the index of worker 0 of the loader that is being started, or was last
        self._next = 0
        self._seconds: Any = ()

    def reserve(self, workers: int) -> None:
        """Entries for the workers of a loader that this process is about to start."""
        if self._owner != os.getpid():
            memory = mmap.mmap(-1, 8 * CLOCK_ENTRIES)
            self._owner, self._next, self._seconds = os.getpid(), 0, memoryview(memory).cast("d")
        self._first, self._next = self._next, (self._next + workers) % CLOCK_ENTRIES

    def time_this_worker(self) -> None:
        """In a worker: have it write down what each batch takes. Not if it was not forked from the clock's owner."""
        if self._owner == os.getppid():
            stopwatch = Stopwatch(self._add)
            for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):  # noqa: SLF001
                replace(fetcher, "fetch", stopwatch.time)

    @property
    def is_mine(self) -> bool:
        """Whether this process has started workers."""
        return self._owner == os.getpid()

    def total(self) -> float:
        """Seconds of all workers that this process has started, of the batches that are finished."""
        return float(sum(self._seconds))

    def _add(self, seconds: float) -> None:
        """In a worker, whose number is known only by the time of its first batch."""
        worker = _utils.worker.get_worker_info()
        if worker is not None:
            self._seconds[(self._first + worker.id) % CLOCK_ENTRIES] += seconds


class Stopwatch:
    """Hands the seconds of each batch to `add`. A dataset that has a loader of its own inside counts once."""

    def __init__(self, add: Callable[[float], None]) -> None:
        self._add = add
        self._runs = False

    def time(self, original: Function) -> Function:
        """A wrapper of the fetcher's `original` that hands its seconds to `add`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._runs:
                return original(*args, **kwargs)
            self._runs, began = True, time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self._runs = False
                self._add(time.monotonic() - began)

        return timed


class WorkerTimeRecorder:
    """The workers' time in the record, divided into working and idle. Both are of the same moment: so their ratio is
    exact, however seldom that is.
    """

    def __init__(self, timeline: Timeline, clock: WorkerClock) -> None:
        self._timeline = timeline
        self._clock = clock
        self._until = timeline.last_event  # monotonic: what is in the record

    def poll(self) -> None:
        """Take what has passed since the last poll, by the workers of the loader that the last batch came from."""
        timeline = self._timeline
        seconds, self._until = timeline.last_event - self._until, timeline.last_event
        if not self._clock.is_mine:
            return
        iterator = timeline.job.objects[LOADER]() if LOADER in timeline.job.objects else None
        workers = getattr(iterator, "_num_workers", 0)
        slots = timeline.writer.slots
        added = self._clock.total() - slots[WORKING]
        slots[WORKING] += added
        slots[IDLE] += max(0.0, workers * seconds - added)


class Workers:
    """Watches where workers are made, where they begin and where they end, in torch and in torchdata."""

    def __init__(self, timeline: Timeline, guard: Guard, clock: WorkerClock) -> None:
        self._in_data_wait = in_phase(timeline, guard, layout.DATA_WAIT, unless_within=DATA_WAIT)
        self._reserve, self._time_this_worker = guard(clock.reserve), guard(clock.time_this_worker)
        self._poll = guard(self._watch_torchdata)
        self._undo: list[Undo] = []
        self._watches_torchdata = False

    def watch(self) -> None:
        """Watch torch's loaders."""
        self._watch(dataloader._MultiProcessingDataLoaderIter, _utils.worker)  # noqa: SLF001 - makes the workers
        self._undo.append(replace(dataloader._BaseDataLoaderIter, "__init__", self._making))  # noqa: SLF001 - as above

    def remove(self) -> None:
        """Restore everything."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _watch_torchdata(self) -> None:
        """Watch torchdata's loaders, when one of its iterators is made for the first time."""
        module = sys.modules.get(f"{TORCHDATA}.stateful_dataloader")
        if module is None or self._watches_torchdata:
            return
        self._watches_torchdata = True
        self._watch(module._StatefulMultiProcessingDataLoaderIter, sys.modules[f"{TORCHDATA}.worker"])  # noqa: SLF001
        # Two names of one function, which a spawned worker is given by its first one.
        worker_loop = sys.modules[f"{TORCHDATA}.worker"]._worker_loop  # noqa: SLF001 - as above
        self._undo.append(replace(module, "_worker_loop", lambda _original: worker_loop))
        self._undo.append(replace(module.StatefulDataLoader, "__iter__", self._in_data_wait))

    def _watch(self, iterator: type, worker: Any) -> None:
        self._undo.append(replace(iterator, "_shutdown_workers", self._in_data_wait))
        # Pickled by name: in a spawned worker it is the library's own.
        self._undo.append(replace(worker, "_worker_loop", self._working))

    def _making(self, original: Function) -> Function:
        def watched(iterator: Any, loader: Any) -> None:
            if loader.num_workers:
                self._poll()
                self._reserve(loader.num_workers)
            original(iterator, loader)

        return watched

    def _working(self, original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._time_this_worker()
            return original(*args, **kwargs)

        return watched


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the workers of every loader; take their sum at each poll."""
    clock = WorkerClock()
    workers = Workers(timeline, guard, clock)
    workers.watch()
    poll = guard(WorkerTimeRecorder(timeline, clock).poll)
    timeline.steps.polls.append(poll)
    return [lambda: timeline.steps.polls.remove(poll), workers.remove]
