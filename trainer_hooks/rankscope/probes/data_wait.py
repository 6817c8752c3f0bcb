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

from torch import Tensor, is_grad_enabled
from torch.utils.data import dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.batch_size import size_of, tokens_of
from rankscope.probes.span import Function, in_phase
from rankscope.probes.timed_iterator import TimedIterator, timed_iterator
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.batches import Batch, Source
from rankscope.timeline.phases import flat
from rankscope.timeline.timeline import Timeline

LOADER = "loader"  # the role, in `timeline.job.objects`, of the iterator that the last batch came from
MICRO_STEPS = INDEX["micro_steps"]
MAP = dataloader._DatasetKind.Map  # noqa: SLF001 - no public question
NESTING = frozenset({layout.EVALUATION, layout.DATA_WAIT})  # phases within which a batch may be no batch of the loop
MOST_LENGTHS = 4096  # of lists of indices: more than a loader's workers fetch ahead


class BatchCounter:
    """Notes the size of each batch that is fetched, for the step that uses it.

    Where it runs in each step it reads `__class__`, without the call of `type`.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._batches = timeline.steps.batches
        self._lengths_by_iterator: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()
        self._iterator: Callable[[], Any] = lambda: None  # a weak reference to the last one, and its lengths
        self._lengths: deque[int] = deque()

    def began(self, _call: tuple[Any, ...], iterator: Any) -> None:
        """A DataLoader gave an iterator. One with persistent workers begins again."""
        if iterator is not None and is_grad_enabled() and not self._is_nested():
            source = self._batches.begin(iterator, self._passes())
            self._timeline.job.objects[LOADER] = source.iterator

    def ask(self, guard: Guard) -> Callable[[Function], Function]:
        """Wrap what a DataLoader's iterator takes its next index from: usually a list of one for each sample."""

        def wrap(original: Function) -> Function:
            def watched(iterator: Any) -> Any:
                index = original(iterator)
                if guard.blown:
                    return index
                try:
                    if self._iterator() is not iterator:
                        self._iterator, self._lengths = weakref.ref(iterator), self._lengths_of(iterator)
                    # Without automatic batching, any other index (a text, a pair of numbers) is one key of the dataset.
                    if index.__class__ is list or (iterator._auto_collation and isinstance(index, Sized)):  # noqa: SLF001
                        self._lengths.append(len(index))
                except BaseException as error:
                    guard.blow(error)
                return index

            return watched

        return wrap

    def fetched(self, call: tuple[Any, ...], batch: Any) -> None:
        """A DataLoader's iterator, `call[0]`, gave `batch`, or None: also if it raised, mostly as it is used up.

        Not within a phase of `NESTING`.
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
            self.fetched_unusually(call, batch)

    def fetched_unusually(self, call: tuple[Any, ...], batch: Any) -> None:
        """`fetched` in any phase, of any iterator."""
        iterator = call[0]
        lengths = self._lengths_of(iterator)
        length = lengths.popleft() if lengths and not is_used_up(batch) else None
        source = self.note(iterator, batch, full_batch_size(iterator) if length is None else length)
        if source is not None:
            source.lengths = lengths

    def note(self, iterator: Any, batch: Any, length: int | None = None) -> Source | None:
        """Note a batch of so many samples, None if its structure has to tell them. Return the source that it is of."""
        if self._is_nested() or not is_grad_enabled():
            return None
        batches = self._batches
        if batch is None:
            if is_used_up(batch):
                batches.use_up(iterator, self._passes())
            return None
        source = batches.source(iterator, self._passes())
        source.fetched.append(size_of(batch) if length is None else Batch(length, tokens_of(batch)))
        source.in_evaluation = self._timeline.job.is_evaluating()
        batches.fetched += 1
        self._timeline.job.objects[LOADER] = source.iterator
        return source

    def _lengths_of(self, iterator: Any) -> deque[int]:
        """Return the lengths of the lists of indices whose batches a DataLoader's iterator has not given yet.

        One that fetches in this process gives what it asked for last: if it resumes it has asked for more. Those of a
        stream ask for a whole batch where less is left.
        """
        lengths = self._lengths_by_iterator.get(iterator)
        if lengths is None:
            most = MOST_LENGTHS if iterator._num_workers else 1  # noqa: SLF001 - the loader is not known
            is_stream = iterator._dataset_kind != MAP  # noqa: SLF001 - likewise
            lengths = self._lengths_by_iterator[iterator] = deque(maxlen=0 if is_stream else most)
        return lengths

    def _passes(self) -> float:
        return float(self._timeline.writer.slots[MICRO_STEPS])

    def _is_nested(self) -> bool:
        """Whether this is within an evaluation, or within the fetch of a loader, whose own batch counts."""
        around = self._timeline.open_phases
        if around[1] is None:
            return False
        phases = flat(around)
        waits = phases.count(layout.DATA_WAIT)
        return layout.EVALUATION in phases or waits > self._batches.timed_fetches


def is_used_up(batch: Any) -> bool:
    """Whether an iterator that gave `batch`, as far as a caller in its `finally` knows, is used up."""
    return batch is None and sys.exc_info()[0] is StopIteration


def full_batch_size(iterator: Any) -> int | None:
    """Return the batch size of a DataLoader over a stream that drops a last, shorter batch; None for others."""
    if iterator._dataset_kind == MAP or not getattr(iterator, "_drop_last", False):  # noqa: SLF001 - as above
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

    def note(call: tuple[Any, ...], batch: Any) -> None:
        if not call[0].has_loader:
            counter.note(call[0], batch)

    return timed_iterator(iterator, in_phase(timeline, guard, layout.DATA_WAIT, note)(fetch))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the start of a DataLoader, and the methods that every iterator of one goes through."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the only place that sees every loader
    counter = BatchCounter(timeline)
    nested = in_phase(timeline, guard, layout.DATA_WAIT, counter.fetched_unusually)
    fetch = in_phase(timeline, guard, layout.DATA_WAIT, counter.fetched, unless_within=NESTING, left_alone=nested)
    start = in_phase(timeline, guard, layout.DATA_WAIT, counter.began, unless_within=frozenset({layout.DATA_WAIT}))
    return [
        replace(dataloader.DataLoader, "__iter__", start),
        replace(iterator, "_next_index", counter.ask(guard)),
        replace(iterator, "__next__", fetch),
    ]
