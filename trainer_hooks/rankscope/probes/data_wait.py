"""Data wait: the time in which the training thread waits for its next batch; and the samples of each batch.

A DataLoader over a map-style dataset requests a batch by a list of indices, one per sample, so the list's length is the
number of samples. Otherwise batch_size.py counts them. Batches fetched in the phase `evaluation` or without gradients
do not count. timeline/batches.py assigns batches to steps.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, is_grad_enabled
from torch.utils.data import dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.batch_size import size_of
from rankscope.probes.span import Function, in_phase
from rankscope.probes.timed_iterator import TimedIterator, timed_iterator
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.batches import Source
from rankscope.timeline.phases import flatten
from rankscope.timeline.timeline import Timeline

LOADER = "loader"  # the role, in `timeline.job.objects`, of the iterator that the last batch came from
MICRO_STEPS = INDEX["micro_steps"]
MAP = dataloader._DatasetKind.Map  # noqa: SLF001 - no public API
NESTING = frozenset({layout.EVALUATION, layout.DATA_WAIT})  # phases in which a batch may not be the training loop's
MOST_LENGTHS = 4096  # lists of indices: more than a loader's workers prefetch


class BatchCounter:
    """Notes the size of each fetched batch, for the step that uses it.

    Code that runs in each step reads `__class__`, which is faster than calling `type`.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._batches = timeline.steps.batches
        self._lengths_by_iterator: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()
        self._iterator: Callable[[], Any] = lambda: None  # a weak reference to the last one, and its lengths
        self._lengths: deque[int] = deque()

    def note_start(self, _call: tuple[Any, ...], iterator: Any) -> None:
        """Note that a DataLoader returned an iterator; with persistent workers it is the same one again."""
        if iterator is not None and is_grad_enabled() and not self._is_nested():
            source = self._batches.begin(iterator, self._passes())
            self._timeline.job.objects[LOADER] = source.iterator

    def watch_index(self, guard: Guard) -> Callable[[Function], Function]:
        """Wrap the method that gives a DataLoader's iterator its next index: usually a list with one per sample."""

        def wrap(original: Function) -> Function:
            def watched(iterator: Any) -> Any:
                index = original(iterator)
                if guard.disabled:
                    return index
                try:
                    if self._iterator() is not iterator:
                        self._iterator, self._lengths = weakref.ref(iterator), self._lengths_of(iterator)
                    # Without automatic batching, an index that is no list (a text, a pair) is one key of the dataset.
                    if index.__class__ is list or (iterator._auto_collation and isinstance(index, Sized)):  # noqa: SLF001 - no public API
                        self._lengths.append(len(index))
                except BaseException as error:
                    guard.disable(error)
                return index

            return watched

        return wrap

    def count_batch(self, call: tuple[Any, ...], batch: Any) -> None:
        """Note a `batch` from a DataLoader's iterator, `call[0]`; None also if it raised, usually as it is exhausted.

        Not called in a phase of `NESTING`.
        """
        batches = self._batches
        source = batches.usual
        if (  # nearly always
            source.lengths
            and source.iterator() is call[0]
            and not batches.samples
            and batch.__class__ is list
            and batch
            and batch[0].__class__ is Tensor  # no tokens
            and is_grad_enabled()
        ):
            batches.samples = source.lengths.popleft()
        else:
            self.count_batch_slow_path(call, batch)

    def count_batch_slow_path(self, call: tuple[Any, ...], batch: Any) -> None:
        """Do what `count_batch` does, in any phase and for any iterator."""
        iterator = call[0]
        lengths = self._lengths_of(iterator)
        length = lengths.popleft() if lengths and not is_exhausted(batch) else None
        source = self.note(iterator, batch, full_batch_size(iterator) if length is None else length)
        if source is not None:
            source.lengths = lengths

    def note(self, iterator: Any, batch: Any, length: int | None = None) -> Source | None:
        """Note a batch of `length` samples (None: count them by its structure). Return the source of the batch."""
        if self._is_nested() or not is_grad_enabled():
            return None
        batches = self._batches
        if batch is None:
            if is_exhausted(batch):
                batches.note_exhausted(iterator, self._passes())
            return None
        source = batches.source(iterator, self._passes())
        source.fetched.append(size_of(batch, length))
        source.in_evaluation = self._timeline.job.is_evaluating()
        batches.fetched += 1
        self._timeline.job.objects[LOADER] = source.iterator
        return source

    def _lengths_of(self, iterator: Any) -> deque[int]:
        """Return the lengths of the index lists whose batches a DataLoader's iterator has not returned yet.

        An iterator without workers returns the batch that it requested last, so only one length is kept; a resumed one
        has requested more. A stream gets none: it requests a full batch even if less is left.
        """
        lengths = self._lengths_by_iterator.get(iterator)
        if lengths is None:
            most = MOST_LENGTHS if iterator._num_workers else 1  # noqa: SLF001 - its loader is not known
            is_stream = iterator._dataset_kind != MAP  # noqa: SLF001 - likewise
            lengths = self._lengths_by_iterator[iterator] = deque(maxlen=0 if is_stream else most)
        return lengths

    def _passes(self) -> float:
        """Return the number of backward passes so far."""
        return float(self._timeline.writer.slots[MICRO_STEPS])

    def _is_nested(self) -> bool:
        """Return whether this is inside an evaluation, or inside the fetch of another loader, whose batch counts."""
        around = self._timeline.open_phases
        if around[1] is None:
            return False
        phases = flatten(around)
        waits = phases.count(layout.DATA_WAIT)
        return layout.EVALUATION in phases or waits > self._batches.timed_fetches


def is_exhausted(batch: Any) -> bool:
    """Return whether the iterator that returned `batch` is exhausted. To be called in a `finally` block."""
    return batch is None and sys.exc_info()[0] is StopIteration


def full_batch_size(iterator: Any) -> int | None:
    """Return the batch size of a DataLoader over a stream with `drop_last`; None for other loaders."""
    if iterator._dataset_kind == MAP or not getattr(iterator, "_drop_last", False):  # noqa: SLF001 - as above
        return None
    size = getattr(iterator._index_sampler, "batch_size", None)  # noqa: SLF001 - as above
    return size if isinstance(size, int) else None


def timed(timeline: Timeline, guard: Guard, iterator: Iterator[Any]) -> TimedIterator:
    """Return the iterator with each fetch as data wait and its batches counted.

    If it fetches from a DataLoader, that one's batches count instead, because their sizes are known.
    """
    counter = BatchCounter(timeline)

    def fetch(watched: TimedIterator, ask: Callable[[], Any]) -> Any:
        batches = timeline.steps.batches
        batches.timed_fetches += 1
        before = batches.fetched
        try:
            return ask()
        finally:
            batches.timed_fetches -= 1
            watched.has_loader = batches.fetched != before

    def note(call: tuple[Any, ...], batch: Any) -> None:
        if not call[0].has_loader:
            counter.note(call[0], batch)

    return timed_iterator(iterator, in_phase(timeline, guard, layout.DATA_WAIT, note)(fetch))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch DataLoader's `__iter__`, and the methods that all its iterators call."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the base class of all loaders' iterators
    counter = BatchCounter(timeline)
    nested = in_phase(timeline, guard, layout.DATA_WAIT, counter.count_batch_slow_path)
    fetch = in_phase(timeline, guard, layout.DATA_WAIT, counter.count_batch, unless_within=NESTING, left_alone=nested)
    start = in_phase(timeline, guard, layout.DATA_WAIT, counter.note_start, unless_within=frozenset({layout.DATA_WAIT}))
    return [
        replace(dataloader.DataLoader, "__iter__", start),
        replace(iterator, "_next_index", counter.watch_index(guard)),
        replace(iterator, "__next__", fetch),
    ]
