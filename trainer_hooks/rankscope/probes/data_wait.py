"""Data wait: the time in which the training thread waits for its next batch; and the samples of each batch.

A DataLoader over a map-style dataset requests a batch by a list of indices, one per sample, so the list's length is the
number of samples. Otherwise batch_size.py counts them. If the same list is requested again, each fetch may be trained
on in part (TRL's GRPO), so samples and tokens are unknown. Batches fetched in the phase `evaluation` or without
gradients do not count. timeline/batches.py assigns batches to steps.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.utils.data import dataloader

from rankscope.foreign import attribute, is_known
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.batch_size import size_of
from rankscope.probes.span import Function, in_phase
from rankscope.probes.timed_iterator import TimedIterator, timed_iterator
from rankscope.record import layout
from rankscope.timeline.batches import UNKNOWN, Source
from rankscope.timeline.phases import flatten
from rankscope.timeline.timeline import Timeline

LOADER = "loader"  # the role, in `timeline.job.objects`, of the iterator that the last batch came from
MAP = dataloader._DatasetKind.Map  # noqa: SLF001 - no public API
NESTING = frozenset({layout.EVALUATION, layout.DATA_WAIT})  # phases in which a batch may not be the training loop's
COMPARED = frozenset({int, str, *(kind for kind in (getattr(sys.modules.get("numpy"), "int64", None),) if kind)})
MOST_LENGTHS = 4096  # lists of indices: more than a loader's workers prefetch


class Requests:
    """The requests of a DataLoader's iterator. A length is kept until its batch is returned.

    An iterator without workers returns the batch that it requested last, so only one length is kept; a resumed one has
    requested more. A stream gets none: it requests a full batch even if less is left.
    """

    __slots__ = ("are_repeated", "full_size", "index", "lengths")

    def __init__(self, iterator: Any) -> None:
        is_stream = attribute(iterator, "_dataset_kind") != MAP
        most = MOST_LENGTHS if attribute(iterator, "_num_workers") else 1
        self.lengths: deque[int] = deque(maxlen=0 if is_stream else most)
        self.full_size = full_batch_size(iterator) if is_stream else None
        self.index: list[Any] = []  # the last one
        self.are_repeated = False  # whether an index was requested twice in succession

    def add(self, index: Any, iterator: Any) -> None:
        """Add an index: usually a list with one per sample.

        Without automatic batching, an index that is no list (a text, a pair) is one key of the dataset.
        """
        if not self.lengths.maxlen:
            return
        length: int | None = None
        if type(index) is list:
            length = len(index)
            self.are_repeated = self.are_repeated or is_repeated(index, self.index)
            self.index = index
        elif attribute(iterator, "_auto_collation"):
            length = length_of(index)
        if length is None or self.are_repeated:
            self.lengths.clear()  # the batches are counted one by one from now on
        else:
            self.lengths.append(length)

    def take(self, batch: Any) -> int | None:
        """Return the number of samples of the next `batch`; None if it is not known."""
        return self.lengths.popleft() if self.lengths and not is_exhausted(batch) else self.full_size


class BatchCounter:
    """Notes the size of each fetched batch, for the step that uses it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._batches = timeline.steps.batches
        self._by_iterator: dict[int, Requests] = {}  # by its id: a weak dictionary would call its methods
        self._iterator: Callable[[], Any] = lambda: None  # a weak reference to the last one, and its requests
        self._requests: Requests | None = None

    def note_start(self, _call: tuple[Any, ...], iterator: Any) -> None:
        """Note that a DataLoader returned an iterator; with persistent workers it is the same one again."""
        if iterator is not None and is_grad_enabled() and not self._is_nested():
            source = self._batches.begin(weakref.ref(iterator))
            self._timeline.job.objects[LOADER] = source.iterator

    def watch_index(self, guard: Guard) -> Callable[[Function], Function]:
        """Wrap the method that gives a DataLoader's iterator its next index."""

        def wrap(original: Function) -> Function:
            def watched(iterator: Any) -> Any:
                try:
                    index = original(iterator)
                except StopIteration:  # the next epoch may have the same indices
                    if self._requests is not None:
                        self._requests.index = []
                    raise
                if guard.disabled:
                    return index
                try:
                    requests = self._requests
                    if requests is None or self._iterator() is not iterator:
                        self._iterator, self._requests = (
                            weakref.ref(iterator),
                            (requests := self._requests_of(iterator)),
                        )
                    requests.add(index, iterator)
                except BaseException as error:
                    guard.handle(error)
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
            and type(batch) is list
            and batch
            and type(batch[0]) is Tensor  # no tokens
            and is_grad_enabled()
        ):
            batches.samples = source.lengths.popleft()
        else:
            self.count_batch_slow_path(call, batch)

    def count_batch_slow_path(self, call: tuple[Any, ...], batch: Any) -> None:
        """Do what `count_batch` does, in any phase and for any iterator."""
        iterator = call[0]
        requests = self._requests_of(iterator)
        source = self.note(iterator, batch, requests.take(batch), requests.are_repeated)
        if source is not None:
            source.lengths = requests.lengths

    def note(self, iterator: Any, batch: Any, length: int | None = None, is_repeated: bool = False) -> Source | None:
        """Note a batch of `length` samples (None: count them by its structure). Return the source of the batch."""
        if self._is_nested() or not is_grad_enabled():
            return None
        if batch is None:
            if is_exhausted(batch):
                self._batches.note_exhausted(iterator)
            return None
        self._timeline.job.repeats_batches = is_repeated
        source = self._batches.add(weakref.ref(iterator), UNKNOWN if is_repeated else size_of(batch, length))
        source.in_evaluation = self._timeline.job.is_evaluating()
        self._timeline.job.objects[LOADER] = source.iterator
        return source

    def note_elsewhere(self, iterator: Any, batch: Any, length: int | None = None, is_repeated: bool = False) -> None:
        """Do what `note` does, on a thread that is not followed: the batch counts if that changes before its use."""
        if not is_grad_enabled():
            return
        if batch is not None:
            self._batches.keep_elsewhere(iterator, UNKNOWN if is_repeated else size_of(batch, length))
        elif is_exhausted(batch):
            self._batches.keep_elsewhere(iterator, None)

    def count_batch_elsewhere(self, call: tuple[Any, ...], batch: Any) -> None:
        """Do what `count_batch` does, on a thread that is not followed."""
        requests = self._requests_of(call[0])
        self.note_elsewhere(call[0], batch, requests.take(batch), requests.are_repeated)

    def _requests_of(self, iterator: Any) -> Requests:
        requests = self._by_iterator.get(id(iterator))
        if requests is None:
            requests = self._by_iterator[id(iterator)] = Requests(iterator)
            weakref.finalize(iterator, self._by_iterator.pop, id(iterator), None).atexit = False  # before it is reused
        return requests

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


def is_repeated(index: list[Any], last: list[Any]) -> bool:
    """Return whether two lists of several indices are the same. Only numbers and texts are compared by value."""
    if len(index) != len(last) or len(index) == 1:  # one sample has no parts, and is drawn again by chance
        return False
    if type(index[0]) in COMPARED and type(last[0]) in COMPARED and index[0] != last[0]:  # nearly always
        return False
    return all(map(is_, index, last)) or (COMPARED.issuperset({*map(type, index), *map(type, last)}) and index == last)


def length_of(index: Any) -> int | None:
    """Return the number of samples that an index of a known type requests; None for another type."""
    kind = type(index)
    if issubclass(kind, (list, tuple)):
        return (list if issubclass(kind, list) else tuple).__len__(index)
    if kind is range:
        return len(index)
    shape = attribute(index, "shape") if is_known(kind) else None
    return int(shape[0]) if shape else None


def full_batch_size(iterator: Any) -> int | None:
    """Return the batch size of a DataLoader over a stream with `drop_last`; None for other loaders."""
    if not attribute(iterator, "_drop_last"):
        return None
    size = attribute(attribute(iterator, "_index_sampler"), "batch_size")
    return size if type(size) is int else None


def timed(timeline: Timeline, guard: Guard, iterator: Iterator[Any]) -> TimedIterator:
    """Return the iterator with each fetch as data wait and its batches counted.

    If it fetches from a DataLoader, that one's batches count instead, because their sizes are known.
    """
    counter = BatchCounter(timeline)

    def fetch(watched: TimedIterator, ask: Callable[[], Any]) -> Any:
        batches = timeline.steps.batches
        batches.timed_fetches += 1
        before = batches.fetched_here()
        try:
            return ask()
        finally:
            batches.timed_fetches -= 1
            watched.has_loader = batches.fetched_here() != before

    def note(call: tuple[Any, ...], batch: Any) -> None:
        if not call[0].has_loader:
            counter.note(call[0], batch)

    def note_elsewhere(call: tuple[Any, ...], batch: Any) -> None:
        if not call[0].has_loader:
            counter.note_elsewhere(call[0], batch)

    watch = in_phase(timeline, guard, layout.DATA_WAIT, note, missed=note_elsewhere)
    return timed_iterator(iterator, watch(fetch))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch DataLoader's `__iter__`, and the methods that all its iterators call."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the base class of all loaders' iterators
    counter = BatchCounter(timeline)
    elsewhere = counter.count_batch_elsewhere
    nested = in_phase(timeline, guard, layout.DATA_WAIT, counter.count_batch_slow_path, missed=elsewhere)
    fetch = in_phase(
        timeline,
        guard,
        layout.DATA_WAIT,
        counter.count_batch,
        missed=elsewhere,
        unless_within=NESTING,
        left_alone=nested,
    )
    start = in_phase(timeline, guard, layout.DATA_WAIT, counter.note_start, unless_within=frozenset({layout.DATA_WAIT}))
    return [
        replace(dataloader.DataLoader, "__iter__", start),
        replace(iterator, "_next_index", counter.watch_index(guard)),
        replace(iterator, "__next__", fetch),
    ]
