"""Loader workers: the time in which they make batches, by their own clocks.

Data wait shows that a batch was late, not which loader is slow: with prefetched batches, a rank whose loader is almost
too slow never waits. The working share of a loader's workers shows how close it is to that.

A forked worker writes into memory that it shares with the rank. A spawned worker has none and is not seen. torchdata's
StatefulDataLoader has its own iterators and worker loop, which are watched once it is in use. The start and the
shutdown of a loader's workers are data wait.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import _utils, dataloader

from rankscope.foreign import attribute
from rankscope.guard import Guard
from rankscope.patch import Patches, Undo, replace
from rankscope.probes.data_wait import LOADER
from rankscope.probes.span import Function, in_phase
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

WORKING = INDEX["loader_worker_seconds"]
IDLE = WORKING + layout.LOADER_WORKER_STATES.index("idle")

CLOCK_ENTRIES = 512  # an entry is reused after this many workers

TORCHDATA = "torchdata.stateful_dataloader"
DATA_WAIT = frozenset({layout.DATA_WAIT})


class WorkerClock:
    """The workers' seconds, one entry per worker. Each process has its own, because ranks may be forked from it."""

    def __init__(self) -> None:
        self._owner = 0  # the process whose workers write here
        self._first = 0  # the index of worker 0 of the loader started last
        self._next = 0
        self._seconds: Any = ()

    def reserve(self, workers: int) -> None:
        """Reserve entries for the workers of a loader that this process is about to start."""
        if self._owner != os.getpid():
            memory = mmap.mmap(-1, 8 * CLOCK_ENTRIES)
            self._owner, self._next, self._seconds = os.getpid(), 0, memoryview(memory).cast("d")
        self._first, self._next = self._next, (self._next + workers) % CLOCK_ENTRIES

    def time_this_worker(self) -> None:
        """Measure each batch of this worker, if it was forked from the clock's owner. Called in the worker."""
        if self._owner == os.getppid():
            stopwatch = Stopwatch(self._add)
            for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):  # noqa: SLF001 - no public API
                replace(fetcher, "fetch", stopwatch.time)

    @property
    def has_started_workers(self) -> bool:
        """True if this process has started workers."""
        return self._owner == os.getpid()

    def total(self) -> float:
        """Return the seconds of all finished batches of the workers that this process has started."""
        return float(sum(self._seconds))

    def _add(self, seconds: float) -> None:
        """Add seconds of this worker, whose number is not known before its first batch."""
        worker = _utils.worker.get_worker_info()
        if worker is not None:
            self._seconds[(self._first + worker.id) % CLOCK_ENTRIES] += seconds


class Stopwatch:
    """Passes the seconds of each batch to `add`. A batch of a loader inside the dataset does not count twice."""

    def __init__(self, add: Callable[[float], None]) -> None:
        self._add = add
        self._runs = False

    def time(self, original: Function) -> Function:
        """Wrap the fetcher's `original` to pass its seconds to `add`."""

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
    """Records the workers' time as working and idle. Both are updated together, so that their ratio is exact."""

    def __init__(self, timeline: Timeline, clock: WorkerClock) -> None:
        self._timeline = timeline
        self._clock = clock
        self._until = timeline.last_event  # monotonic; recorded up to here

    def poll(self) -> None:
        """Record the time since the last poll, for the workers of the loader that the last batch came from."""
        timeline = self._timeline
        seconds, self._until = timeline.last_event - self._until, timeline.last_event
        if not self._clock.has_started_workers:
            return
        iterator = timeline.job.objects[LOADER]() if LOADER in timeline.job.objects else None
        workers = attribute(iterator, "_num_workers")
        if type(workers) is not int:
            workers = 0
        slots = timeline.writer.slots
        added = self._clock.total() - slots[WORKING]
        slots[WORKING] += added
        slots[IDLE] += max(0.0, workers * seconds - added)


class Workers:
    """Watches the creation, the start and the shutdown of workers, in torch and in torchdata."""

    def __init__(self, timeline: Timeline, guard: Guard, clock: WorkerClock) -> None:
        self._in_data_wait = in_phase(timeline, guard, layout.DATA_WAIT, unless_within=DATA_WAIT)
        self._reserve, self._time_this_worker = clock.reserve, guard(clock.time_this_worker)
        self._prepare = guard(self._prepare_workers)
        self._patches = Patches()
        self.remove = self._patches.undo
        self._watches_torchdata = False

    def watch(self) -> None:
        """Watch torch's loaders."""
        self._watch(dataloader._MultiProcessingDataLoaderIter, _utils.worker)  # noqa: SLF001 - makes the workers
        self._patches.add(dataloader._BaseDataLoaderIter, "__init__", self._wrap_init)  # noqa: SLF001 - as above

    def _watch_torchdata(self) -> None:
        """Watch torchdata's loaders when the first of its iterators is made."""
        module = sys.modules.get(f"{TORCHDATA}.stateful_dataloader")
        if module is None or self._watches_torchdata:
            return
        self._watches_torchdata = True
        self._watch(module._StatefulMultiProcessingDataLoaderIter, sys.modules[f"{TORCHDATA}.worker"])  # noqa: SLF001 - no public API
        # The function has two names; pickle finds it for a spawned worker by the first.
        worker_loop = sys.modules[f"{TORCHDATA}.worker"]._worker_loop  # noqa: SLF001 - as above
        self._patches.add(module, "_worker_loop", lambda _original: worker_loop)
        self._patches.add(module.StatefulDataLoader, "__iter__", self._in_data_wait)

    def _watch(self, iterator: type, worker: Any) -> None:
        self._patches.add(iterator, "_shutdown_workers", self._in_data_wait)
        # Pickled by name: a spawned worker gets the library's own function.
        self._patches.add(worker, "_worker_loop", self._wrap_worker_loop)

    def _prepare_workers(self, loader: Any) -> None:
        workers = attribute(loader, "num_workers")
        if type(workers) is int and workers:
            self._watch_torchdata()
            self._reserve(workers)

    def _wrap_init(self, original: Function) -> Function:
        def watched(iterator: Any, loader: Any) -> None:
            self._prepare(loader)
            original(iterator, loader)

        return watched

    def _wrap_worker_loop(self, original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._time_this_worker()
            return original(*args, **kwargs)

        return watched


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the workers of every loader, and record their time at each poll."""
    clock = WorkerClock()
    workers = Workers(timeline, guard, clock)
    workers.watch()
    poll = guard(WorkerTimeRecorder(timeline, clock).poll)
    return [timeline.steps.add_poll(poll), workers.remove]
