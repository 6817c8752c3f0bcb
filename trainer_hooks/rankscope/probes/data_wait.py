"""Data wait: the time in which the training thread asks for its next batch; and how many samples the batch has.

A DataLoader over a map-style dataset asks for a batch by a list of indices, one for each sample: its length is the
samples, whatever the batch is. Elsewhere the structure of the batch tells them, or they are unknown. What is fetched
within the phase `evaluation` or without gradients is not noted. timeline/batches.py says what a step was trained on.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any
from weakref import WeakKeyDictionary

from torch import is_grad_enabled
from torch.utils.data import dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.batch_size import size_of, tokens_of
from rankscope.probes.span import Function, in_phase
from rankscope.probes.timed_iterator import TimedIterator, timed_iterator
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.batches import Batch
from rankscope.timeline.phases import flat
from rankscope.timeline.timeline import Timeline

LOADER = "loader"  # the role, in `timeline.job.objects`, of the iterator that the last batch came from
MICRO_STEPS = INDEX["micro_steps"]
MAP = dataloader._DatasetKind.Map  # noqa: SLF001 - no public question
MOST_LENGTHS = 4096  # of lists of indices: more than a loader's workers fetch ahead


class BatchCounter:
    """Notes the size of each batch that is fetched, for the step that uses it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        # Of each DataLoader's iterator, the lengths of the lists of indices whose batches were not fetched yet.
        self._lengths_by_iterator: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()
        self._iterator: Callable[[], Any] = lambda: None  # a weak reference to the last one, and its lengths
        self._lengths: deque[int] = deque()

    def began(self, _call: tuple[Any, ...], iterator: Any, _seconds: float) -> None:
        """A DataLoader gave an iterator. One with persistent workers begins again."""
        if iterator is not None and is_grad_enabled() and not self._is_nested():
            source = self._timeline.steps.batches.begin(iterator, self._passes())
            self._timeline.job.objects[LOADER] = source.iterator

    def asked(self, iterator: Any, index: Any) -> None:
        """A DataLoader's iterator is about to fetch the samples of `index`: usually a list of one for each of them."""
        if self._iterator() is not iterator:
            self._change(iterator)
        # Without automatic batching, any other index (a text, a pair of numbers) is one key of the dataset.
        if type(index) is list or (iterator._auto_collation and isinstance(index, Sized)):  # noqa: SLF001
            self._lengths.append(len(index))

    def fetched(self, call: tuple[Any, ...], batch: Any, _seconds: float) -> None:
        """A DataLoader's iterator, `call[0]`, gave `batch`, or None: also if it raised, mostly as it is used up."""
        iterator = call[0]
        if self._iterator() is not iterator:
            self._change(iterator)
        lengths = self._lengths
        if not lengths or (batch is None and is_used_up(batch)):
            length = None
        elif iterator._num_workers:  # noqa: SLF001 - the loader is not known
            length = lengths.popleft()
        else:  # one that resumes may have asked for more
            length = lengths.pop()
            lengths.clear()
        if iterator._dataset_kind != MAP:  # noqa: SLF001 - likewise
            length = full_batch_size(iterator)
        self.note(iterator, batch, length)

    def note(self, iterator: Any, batch: Any, length: int | None = None) -> None:
        """Note a batch of so many samples, None if its structure has to tell them."""
        if self._is_nested() or not is_grad_enabled():
            return
        batches = self._timeline.steps.batches
        if batch is None:
            if is_used_up(batch):
                batches.use_up(iterator, self._passes())
            return
        if not batches.sources or (source := batches.sources[-1]).iterator() is not iterator or source.is_used_up:
            source = batches.source(iterator, self._passes())
            self._timeline.job.objects[LOADER] = source.iterator
        source.fetched.append(size_of(batch) if length is None else Batch(length, tokens_of(batch)))
        source.in_evaluation = self._timeline.job.is_evaluating()
        batches.fetched += 1

    def _change(self, iterator: Any) -> None:
        self._lengths = self._lengths_by_iterator.setdefault(iterator, deque(maxlen=MOST_LENGTHS))
        self._iterator = weakref.ref(iterator)

    def _passes(self) -> float:
        return float(self._timeline.writer.slots[MICRO_STEPS])

    def _is_nested(self) -> bool:
        """Whether this is within an evaluation, or within the fetch of a loader, whose own batch counts."""
        around = self._timeline.open_phases
        if around[1] is None:
            return False
        phases = flat(around)
        waits = phases.count(layout.DATA_WAIT)
        return layout.EVALUATION in phases or waits > self._timeline.steps.batches.timed_fetches


def is_used_up(batch: Any) -> bool:
    """Whether an iterator that gave `batch`, as far as a caller in its `finally` knows, is used up."""
    return batch is None and sys.exc_info()[0] is StopIteration


def full_batch_size(iterator: Any) -> int | None:
    """Return the batch size of a DataLoader over a stream that drops a last, shorter batch; None for others."""
    if not getattr(iterator, "_drop_last", False):
        return None
    size = getattr(iterator._index_sampler, "batch_size", None)  # noqa: SLF001 - as above
    return size if isinstance(size, int) else None


def timed(timeline: Timeline, guard: Guard, iterator: Iterator[Any]) -> TimedIterator:
    """Return the iterator, each of whose fetches is data wait and whose batches count.

    If it fetches from a DataLoader, the batches of that one count, whose sizes are known.
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

    def note(call: tuple[Any, ...], batch: Any, _seconds: float) -> None:
        if not call[0].has_loader:
            counter.note(call[0], batch)

    return timed_iterator(iterator, in_phase(timeline, guard, layout.DATA_WAIT, note)(fetch))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the start of a DataLoader, and the methods that every iterator of one goes through."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the only place that sees every loader
    counter = BatchCounter(timeline)
    fetch = in_phase(timeline, guard, layout.DATA_WAIT, counter.fetched)
    start = in_phase(timeline, guard, layout.DATA_WAIT, counter.began, unless_within=frozenset({layout.DATA_WAIT}))
    return [
        replace(dataloader.DataLoader, "__iter__", start),
        replace(iterator, "_next_index", _ask(counter, guard)),
        replace(iterator, "__next__", fetch),
    ]


def _ask(counter: BatchCounter, guard: Guard) -> Callable[[Function], Function]:
    def wrap(original: Function) -> Function:
        def watched(iterator: Any) -> Any:
            index = original(iterator)
            try:
                if not guard.blown:
                    counter.asked(iterator, index)
            except BaseException as error:
                guard.blow(error)
            return index

        return watched

    return wrap
