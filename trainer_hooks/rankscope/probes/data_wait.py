"""Data wait: the time in which the training thread asks for its next batch; and what there is in the batch.

A batch counts when the step ends that it was fetched for. Those of an evaluation do not: the ones fetched within the
phase `evaluation` or without gradients, and those of an iterator that is used up without a step in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, is_grad_enabled
from torch.utils.data import dataloader

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.record import layout
from rankscope.record.numbers import as_number
from rankscope.timeline.timeline import Timeline

Item = TypeVar("Item")

NOT_WITHIN = frozenset({layout.EVALUATION, layout.DATA_WAIT})
LOADER = "loader"  # the role, in `timeline.job.objects`, of the iterator that the last batch came from


class BatchCounter:
    """Counts the samples and tokens of what is fetched, and takes back what turns out to be an evaluation's."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._steps = timeline.steps
        self._current: weakref.ref[Any] | None = None  # the iterator that the last batch came from
        # When the first batch of the current iterator was fetched: the steps, and what had been fetched for the next.
        self._count = 0
        self._samples = self._tokens = 0.0

    def fetched(self, call: tuple[Any, ...], batch: Any, _seconds: float) -> None:
        """`call[0]`, an iterator, gave `batch`; None if it is used up."""
        timeline = self._timeline
        if timeline.open_phases[1] is not None and timeline.is_within(NOT_WITHIN):
            return  # an iterator that asks another one has not handed its own batch out yet
        if not is_grad_enabled():
            return
        iterator = call[0]
        if self._current is None or self._current() is not iterator:
            self._current = timeline.job.objects[LOADER] = weakref.ref(iterator)
            self._begin()
        if batch is None:
            self._used_up()
            return
        first = batch[0] if type(batch) is list and batch else None
        if type(first) is Tensor and (shape := first.shape):  # nearly always: the default collation of pairs
            self._steps.fetched_samples += shape[0]
            return
        samples, tokens = size_of(batch)
        self._steps.fetched_samples += samples or batch_size(iterator)
        self._steps.fetched_tokens += tokens

    def _begin(self) -> None:
        steps = self._steps
        self._count = steps.count
        self._samples, self._tokens = steps.fetched_samples, steps.fetched_tokens

    def _used_up(self) -> None:
        steps = self._steps
        if steps.count == self._count:
            steps.fetched_samples, steps.fetched_tokens = self._samples, self._tokens
        self._begin()  # some iterators begin again


def size_of(batch: Any) -> tuple[float, float]:
    """Samples (the leading dimension of the first tensor) and tokens (the elements of `input_ids`); 0 if unknown."""
    if isinstance(batch, (list, tuple)):  # first, as it is the usual case and Tensor's own check is slower
        return first_size(batch)
    if isinstance(batch, Tensor):
        return (float(batch.shape[0]) if batch.ndim else 0.0), 0.0
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.ndim:
            return float(ids.shape[0]), float(ids.numel())
        return first_size(batch.values())
    return 0.0, 0.0


def first_size(items: Iterable[Any]) -> tuple[float, float]:
    """The samples and tokens of the first item that has any; 0 and 0 if none has."""
    for item in items:
        size = size_of(item)
        if size[0]:
            return size
    return 0.0, 0.0


def batch_size(iterator: Any) -> float:
    """The batch size of a DataLoader's iterator; 0 if it has none. A sampler of the script's may say anything."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return as_number(size) or 0.0 if isinstance(size, int) else 0.0


class TimedIterator(Generic[Item]):
    """What `rankscope.timed` gives: somebody else's iterator, watched."""

    def __init__(self, iterator: Iterator[Item], fetch: Callable[[TimedIterator[Item]], Item]) -> None:
        self.iterator = iterator
        self._fetch = fetch

    def __iter__(self) -> TimedIterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._fetch(self)


def timed(timeline: Timeline, guard: Guard, iterator: Iterator[Item]) -> Iterator[Item]:
    """The same iterator, each of whose fetches is data wait and whose batches are counted."""
    watch = in_phase(timeline, guard, layout.DATA_WAIT, BatchCounter(timeline).fetched)
    return TimedIterator(iterator, watch(lambda watched: next(watched.iterator)))


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the one method that every DataLoader iterator, single- or multi-process, goes through."""
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - the only place that sees every loader
    watch = in_phase(timeline, guard, layout.DATA_WAIT, BatchCounter(timeline).fetched)
    return [replace(iterator, "__next__", watch)]
