"""Assignment of fetched batches to training steps.

The use of a batch cannot be observed, so it is inferred from the events between two steps. A step uses the newest
batches of each iterator, one per backward pass. The other batches were skipped or prefetched. A prefetched batch counts
when its iterator is exhausted and a step has no newer one.

If a step has batches of several iterators, only iterators that still exist count: of the others, the script looked at a
batch or left the loop. An iterator whose last batch was fetched in evaluation mode does not count either. An iterator
that was exhausted without a backward pass was used for evaluation or to fill a cache.

Nearly always there is one iterator, and each step uses one batch of it. Of such a batch only the samples are kept.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BATCHES = 1024  # per iterator, kept until a step ends
MOST_AHEAD = 8  # per iterator, kept longer because they may have been prefetched


class Batch(NamedTuple):
    """The size of a batch. `samples` is None if it is not known."""

    samples: float | None
    tokens: float = 0.0


class Source:
    """The batches of an iterator: those fetched since the last step, and older ones that no step has used."""

    def __init__(self, iterator: Callable[[], Any], passes: float) -> None:
        self.iterator = iterator  # a weak reference
        self.lengths: deque[int] = deque()  # of the index lists whose batches a DataLoader has not returned yet
        self.fetched: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self.is_exhausted = False
        self.in_evaluation = False  # whether the model was in evaluation mode when the last batch was fetched
        self.has_trained = False  # whether a backward pass has ended since its first batch
        self._ahead: deque[Batch] = deque(maxlen=MOST_AHEAD)
        self._began_at = passes  # number of backward passes before its first batch

    def note_exhausted(self, passes: float) -> None:
        """Note that the iterator is exhausted after `passes` backward passes."""
        self.is_exhausted = True
        self.has_trained = self.has_trained or passes > self._began_at

    def take(self, passes: int) -> list[Batch]:
        """Return the batches that `passes` backward passes have used. The remaining ones may be used later."""
        used = [self.fetched.pop() for _ in range(min(passes, len(self.fetched)))]
        if self.is_exhausted:
            used += [self._ahead.pop() for _ in range(min(passes - len(used), len(self._ahead)))]
        self.has_trained = True
        self._ahead.extend(self.fetched)
        self.fetched.clear()
        return used

    @property
    def is_current(self) -> bool:
        """True if a loop takes its training batches from the iterator, as far as is known."""
        if self.is_exhausted:
            return self.has_trained
        return bool(self.fetched) and self.iterator() is not None


NO_SOURCE = Source(lambda: None, 0.0)


class Batches:
    """The batches of all iterators, until a step uses or drops them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the batches of the process that this one was forked from."""
        self.sources: list[Source] = []  # the newest last
        self.fetched = 0  # batches of all iterators so far, except from `usual`
        self.timed_fetches = 0  # nested iterators of `rankscope.timed` that are fetching now
        self.passes = 0.0  # number of backward passes when batches were last taken
        self._used: list[Batch] = []  # since the last step
        # The usual case: the only source, once a step has used a batch of it, and the samples of its only batch since
        # the last step, without tokens.
        self.usual = NO_SOURCE
        self.samples = 0

    def expect_usual(self) -> None:
        """Expect the next step to use one batch of the source again, if there is only one source."""
        if len(self.sources) == 1 and not self.sources[0].is_exhausted:
            self.usual = self.sources[0]

    def end_usual(self) -> None:
        """Treat a batch of the usual source like any other, until `expect_usual` is called."""
        if self.samples:
            self.usual.fetched.append(Batch(self.samples))
            self.usual.in_evaluation = False
            self.samples = 0
        self.usual = NO_SOURCE

    def begin(self, iterator: Any, passes: float) -> Source:
        """Return a new source for an iterator that starts, or starts again, after `passes` backward passes.

        The batches of iterators that end before the step are taken here, while their use is known.
        """
        self.end_usual()
        if passes > self.passes:
            self._take(passes)
        self.sources = [source for source in self.sources if source.iterator() is not iterator or source.is_exhausted]
        self.sources.append(source := Source(weakref.ref(iterator), passes))
        return source

    def source(self, iterator: Any, passes: float) -> Source:
        """Return the source of an iterator that returns a batch after `passes` backward passes."""
        self.end_usual()
        for source in reversed(self.sources):
            if source.iterator() is iterator and not source.is_exhausted:
                return source
        return self.begin(iterator, passes)

    def note_exhausted(self, iterator: Any, passes: float) -> None:
        """Note that an iterator is exhausted after `passes` backward passes."""
        self.end_usual()
        for source in self.sources:
            if source.iterator() is iterator and not source.is_exhausted:
                source.note_exhausted(passes)

    def take(self, passes: float) -> list[Batch]:
        """Return the batches of the step that ends after `passes` backward passes."""
        self.end_usual()
        self._take(passes)
        used, self._used = self._used, []
        self._forget()
        return used

    def _take(self, passes: float) -> None:
        count = max(1, int(passes - self.passes))
        self.passes = passes
        current = [source for source in self.sources if source.is_current] or self._newest(count)
        # All of them, if a framework returns to training mode only after it has fetched the batch.
        for source in [source for source in current if not source.in_evaluation] or current:
            self._used += source.take(count)

    def _newest(self, passes: int) -> list[Source]:
        """Return the newest source, unless it was exhausted with more batches than backward passes."""
        return [source for source in self.sources[-1:] if not source.is_exhausted or len(source.fetched) <= passes]

    def _forget(self) -> None:
        self.sources = [source for source in self.sources if source.iterator() is not None]
        for source in self.sources:
            source.fetched.clear()
