"""Which of the batches that were fetched a step was trained on.

Nothing says what becomes of a batch, so this follows from what happens between two steps. A step uses as many batches
of each iterator as backward passes ran in it, the newest ones. The others were skipped or fetched ahead. One that was
fetched ahead counts when its iterator is used up and a step has no newer batch.

If the batches of a step are of several iterators, those count that still exist: of the others a script looked at a
batch, or left the loop. Nor do those count that gave their last batch in evaluation mode. An iterator that was used up
without a backward pass fed an evaluation or filled a cache.

Nearly always there is one iterator, of which each step uses one batch. Of such a batch only the samples are kept.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BATCHES = 1024  # of one iterator that are kept until a step ends
MOST_AHEAD = 8  # of one iterator that are kept longer, because they may have been fetched ahead


class Batch(NamedTuple):
    """The size of a batch. `samples` is None if it is not known."""

    samples: float | None
    tokens: float = 0.0


class Source:
    """One iterator's batches: those that were fetched since the last step, and older ones that no step has used."""

    def __init__(self, iterator: Callable[[], Any], passes: float) -> None:
        self.iterator = iterator  # a weak reference
        self.lengths: deque[int] = deque()  # of the lists of indices whose batches a DataLoader has not given yet
        self.fetched: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self.is_used_up = False
        self.in_evaluation = False  # the model was in evaluation mode when the last batch was fetched
        self.has_trained = False  # a backward pass has ended since its first batch
        self._ahead: deque[Batch] = deque(maxlen=MOST_AHEAD)
        self._began_at = passes  # how many backward passes had ended then

    def use_up(self, passes: float) -> None:
        """Note that the iterator has no more batches after so many backward passes."""
        self.is_used_up = True
        self.has_trained = self.has_trained or passes > self._began_at

    def take(self, passes: int) -> list[Batch]:
        """Return the batches that `passes` backward passes have used; what is left over may be used later."""
        used = [self.fetched.pop() for _ in range(min(passes, len(self.fetched)))]
        if self.is_used_up:
            used += [self._ahead.pop() for _ in range(min(passes - len(used), len(self._ahead)))]
        self.has_trained = True
        self._ahead.extend(self.fetched)
        self.fetched.clear()
        return used

    @property
    def is_current(self) -> bool:
        """Whether a loop takes its training batches from the iterator, as far as that is known."""
        if self.is_used_up:
            return self.has_trained
        return bool(self.fetched) and self.iterator() is not None


NO_SOURCE = Source(lambda: None, 0.0)


class Batches:
    """The batches of all iterators, until a step uses them or is known not to."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the batches of the process that this one was forked from."""
        self.sources: list[Source] = []  # the newest last
        self.fetched = 0  # batches of all iterators so far, without those that are `usual`
        self.timed_fetches = 0  # iterators of `rankscope.timed` that fetch now, one within another
        self.passes = 0.0  # how many backward passes had ended when batches were taken last
        self._used: list[Batch] = []  # since the last step
        # The usual case: the only source, once a step has used a batch of it, and the samples of the only batch without
        # tokens that it has given since the last step.
        self.usual = NO_SOURCE
        self.samples = 0

    def expect_usual(self) -> None:
        """Expect that the next step, too, uses one batch of the only source, if there is only one."""
        if len(self.sources) == 1 and not self.sources[0].is_used_up:
            self.usual = self.sources[0]

    def end_usual(self) -> None:
        """Treat a batch of the usual source as one of any source, until `expect_usual` is called."""
        if self.samples:
            self.usual.fetched.append(Batch(self.samples))
            self.usual.in_evaluation = False
            self.samples = 0
        self.usual = NO_SOURCE

    def begin(self, iterator: Any, passes: float) -> Source:
        """Return a new source for an iterator that begins, or begins again, after so many backward passes.

        Iterators that end before the step does are settled here, while it is known what was trained on.
        """
        self.end_usual()
        if passes > self.passes:
            self._take(passes)
        self.sources = [source for source in self.sources if source.iterator() is not iterator or source.is_used_up]
        self.sources.append(source := Source(weakref.ref(iterator), passes))
        return source

    def source(self, iterator: Any, passes: float) -> Source:
        """Return the source of an iterator that gives a batch after so many backward passes."""
        self.end_usual()
        for source in reversed(self.sources):
            if source.iterator() is iterator and not source.is_used_up:
                return source
        return self.begin(iterator, passes)

    def use_up(self, iterator: Any, passes: float) -> None:
        """Note that an iterator has no more batches after so many backward passes."""
        self.end_usual()
        for source in self.sources:
            if source.iterator() is iterator and not source.is_used_up:
                source.use_up(passes)

    def take(self, passes: float) -> list[Batch]:
        """Return the batches of the step that ends after so many backward passes."""
        self.end_usual()
        self._take(passes)
        used, self._used = self._used, []
        self._forget()
        return used

    def _take(self, passes: float) -> None:
        count = max(1, int(passes - self.passes))
        self.passes = passes
        current = [source for source in self.sources if source.is_current] or self._newest(count)
        # All of them, where a framework returns to training mode only after it has fetched the batch.
        for source in [source for source in current if not source.in_evaluation] or current:
            self._used += source.take(count)

    def _newest(self, passes: int) -> list[Source]:
        """Return the newest source, unless it was used up with more batches than passes ran."""
        return [source for source in self.sources[-1:] if not source.is_used_up or len(source.fetched) <= passes]

    def _forget(self) -> None:
        self.sources = [source for source in self.sources if source.iterator() is not None]
        for source in self.sources:
            source.fetched.clear()
