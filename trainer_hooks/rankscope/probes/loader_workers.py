"""Loader workers: for how much of the time they make batches, by their own clocks.

Data wait tells that a batch came late, not which loader is slow: batches that are loaded ahead let ranks whose loaders
are nearly as slow never wait. The share of time that a loader's workers are at work is how near it is to that.

A worker that is forked writes into memory that it shares with the rank; one that is spawned has none and is not seen.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import _utils, dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.data_wait import LOADER
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

WORKING = INDEX["loader_worker_seconds"]
IDLE = WORKING + layout.LOADER_WORKER_STATES.index("idle")

BOARD_ENTRIES = 512  # an entry is used again when so many workers have been started since

Function = Callable[..., Any]


class Board:
    """What the workers write: seconds, an entry each. A process has its own, as ranks may be forked from it."""

    def __init__(self) -> None:
        self._owner = 0  # the process whose workers write here
        self._first = 0  # the index of worker 0 of the loader that is being started, or was last
        self._next = 0
        self._seconds: Any = ()

    def reserve(self, workers: int) -> None:
        """Entries for the workers of a loader that this process is about to start."""
        if self._owner != os.getpid():
            memory = mmap.mmap(-1, 8 * BOARD_ENTRIES)
            self._owner, self._next, self._seconds = os.getpid(), 0, memoryview(memory).cast("d")
        self._first, self._next = self._next, (self._next + workers) % BOARD_ENTRIES

    def time_this_worker(self) -> None:
        """In a worker: have it write down what each batch takes. Not if it was not forked from the board's owner."""
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
            self._seconds[(self._first + worker.id) % BOARD_ENTRIES] += seconds


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


class Accounts:
    """The workers' time in the record, divided into working and idle. Both are of the same moment: so their ratio is
    exact, however seldom that is.
    """

    def __init__(self, timeline: Timeline, board: Board) -> None:
        self._timeline = timeline
        self._board = board
        self._until = timeline.last_event  # monotonic: what is in the record

    def poll(self) -> None:
        """Take what has passed since the last poll, by the workers of the loader that the last batch came from."""
        timeline = self._timeline
        seconds, self._until = timeline.last_event - self._until, timeline.last_event
        if not self._board.is_mine:
            return
        iterator = timeline.job.objects[LOADER]() if LOADER in timeline.job.objects else None
        workers = getattr(iterator, "_num_workers", 0)
        slots = timeline.writer.slots
        added = self._board.total() - slots[WORKING]
        slots[WORKING] += added
        slots[IDLE] += max(0.0, workers * seconds - added)


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch where workers are made, and where they begin; take their sum at each poll."""
    board = Board()
    reserve, time_this_worker = guard(board.reserve), guard(board.time_this_worker)
    poll = guard(Accounts(timeline, board).poll)

    def making(original: Function) -> Function:
        def watched(iterator: Any, loader: Any) -> None:
            reserve(loader.num_workers)
            original(iterator, loader)

        return watched

    def working(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            time_this_worker()
            return original(*args, **kwargs)

        return watched

    timeline.steps.polls.append(poll)
    return [
        lambda: timeline.steps.polls.remove(poll),
        replace(dataloader._MultiProcessingDataLoaderIter, "__init__", making),  # noqa: SLF001 - makes the workers
        replace(_utils.worker, "_worker_loop", working),  # pickled by name: in a spawned worker it is torch's own
    ]
