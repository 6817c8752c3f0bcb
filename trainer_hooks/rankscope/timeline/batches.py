"""Assignment of fetched batches to training steps.

The use of a batch cannot be observed, so it is inferred from the events between two steps. A step uses the newest
batches of each iterator, one per backward pass. The other batches were skipped or prefetched. A prefetched batch counts
when its iterator is exhausted and a step has no newer one.

If a step has batches of several iterators, only iterators that still exist count: of the others, the script looked at a
batch or left the loop. An iterator whose last batch was fetched in evaluation mode does not count either. An iterator
that was exhausted without a backward pass was used for evaluation or to fill a cache.

In a step without backward passes, calls of `torch.autograd.grad` explain the batches. If neither explains them, samples
and tokens are unknown: a forward pass followed more batches than there were passes, or most steps fetch more batches
than they have passes (several for each, or most are skipped). Until that is decided, the batches are withheld.

Nearly always there is one iterator, and each step uses one batch of it. Of such a batch only the samples are kept.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.record.layout import FORWARD, INDEX, RING_STEPS

if TYPE_CHECKING:
    from rankscope.timeline.phases import PhaseClock

MOST_BATCHES = 1024  # per iterator, kept until a step ends
MOST_AHEAD = 8  # per iterator, kept longer because they may have been prefetched
MOST_THREADS = 64  # that are not followed and whose batches are kept
MOST_SURPLUS = 8  # steps with more batches than passes, less those without, from which on the samples are unknown

STEPS, MICRO_STEPS = INDEX["steps"], INDEX["micro_steps"]
COPIES = slice(2, None)  # in an entry of the ring: the copied slots, and among them the seconds of forward passes
FORWARD_COPY = COPIES.start + INDEX["phase_seconds"] + FORWARD - INDEX["samples"]


class Batch(NamedTuple):
    """The size of a batch. `samples` and `tokens` are None if they are not known."""

    samples: float | None
    tokens: float | None = 0.0


UNKNOWN = Batch(None, None)


class Source:
    """The batches of an iterator: those fetched since the last step, and older ones that no step has used."""

    def __init__(self, iterator: Callable[[], Any], passes: float) -> None:
        self.iterator = iterator  # a weak reference
        self.lengths: deque[int] = deque()  # of the index lists whose batches a DataLoader has not returned yet
        self.fetched: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self.is_exhausted = False
        self.in_evaluation = False  # whether the model was in evaluation mode when the last batch was fetched
        self.has_trained = False  # whether a backward pass has ended since its first batch
        self.tried = 0  # batches since the last step that a forward pass followed
        self._forward = 0.0  # seconds of forward passes at the last batch
        self._ahead: deque[Batch] = deque(maxlen=MOST_AHEAD)
        self._began_at = passes  # number of backward passes before its first batch

    def add(self, batch: Batch, forward: float) -> None:
        """Add a batch that was fetched after `forward` seconds of forward passes."""
        self._note_forward(forward)
        self.fetched.append(batch)

    def _note_forward(self, forward: float) -> None:
        self.tried += bool(self.fetched) and forward > self._forward
        self._forward = forward

    def note_exhausted(self, passes: float) -> None:
        """Note that the iterator is exhausted after `passes` backward passes."""
        self.is_exhausted = True
        self.has_trained = self.has_trained or passes > self._began_at

    def explain(self, passes: int, forward: float) -> bool:
        """Return whether `passes` backward passes may have used the batches, after `forward` seconds of forward passes.

        A pass uses one batch. Others may have been skipped, but not after a forward pass.
        """
        self._note_forward(forward)
        tried, self.tried = self.tried, 0
        return tried <= passes

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

    def __init__(self, phases: PhaseClock) -> None:
        self._phases = phases
        self.restart()

    def restart(self) -> None:
        """Forget the batches of the process that this one was forked from."""
        self.sources: list[Source] = []  # the newest last
        self.fetched = 0  # batches of all iterators so far, except from `usual`
        self.timed_fetches = 0  # nested iterators of `rankscope.timed` that are fetching now
        self.passes = 0.0  # number of backward passes when batches were last taken
        self.gradients = 0  # calls of `torch.autograd.grad` since then
        self._used: list[Batch] = []  # since the last step, or withheld
        self._surplus = 0  # steps with more batches than passes, less those without
        self._has_explained = False  # whether passes have explained the batches of a step
        # By thread that is not followed: the iterator (a weak reference) and the batch; None if that was exhausted.
        self._elsewhere: dict[int, deque[tuple[Callable[[], Any], Batch | None]]] = {}
        # The usual case: the only source, once a step has used a batch of it, and the samples of its only batch since
        # the last step, without tokens.
        self.usual = NO_SOURCE
        self.samples = 0

    def expect_usual(self) -> None:
        """Expect the next step to use one batch of the source again, if there is only one source."""
        if len(self.sources) == 1 and not self.sources[0].is_exhausted and not self._used:
            self.usual = self.sources[0]

    def end_usual(self) -> None:
        """Treat a batch of the usual source like any other, until `expect_usual` is called."""
        if self.samples:
            phases = self._phases
            at_step = phases.ring[int(phases.slots[STEPS]) % RING_STEPS][FORWARD_COPY]
            self.usual.add(Batch(self.samples), at_step)
            self.usual.in_evaluation = False
            self.samples = 0
        self.usual = NO_SOURCE

    def begin(self, iterator: Callable[[], Any]) -> Source:
        """Return a new source for an iterator (a weak reference) that starts, or starts again.

        The batches of iterators that end before the step are taken here, while their use is known.
        """
        self.end_usual()
        if self._passes() > self.passes:
            self._take()
        known = iterator()
        self.sources = [source for source in self.sources if source.iterator() is not known or source.is_exhausted]
        self.sources.append(source := Source(iterator, self._passes()))
        return source

    def add(self, iterator: Callable[[], Any], batch: Batch) -> Source:
        """Add a batch that an iterator (a weak reference) has returned. Return its source."""
        self.end_usual()
        known = iterator()
        sources = (one for one in reversed(self.sources) if one.iterator() is known and not one.is_exhausted)
        source = next(sources, None) or self.begin(iterator)
        source.add(batch, self._forward())
        self.fetched += 1
        return source

    def note_exhausted(self, iterator: Any) -> None:
        """Note that an iterator is exhausted."""
        self.end_usual()
        for source in self.sources:
            if source.iterator() is iterator and not source.is_exhausted:
                source.note_exhausted(self._passes())

    def keep_elsewhere(self, iterator: Any, batch: Batch | None) -> None:
        """Keep a batch of the calling thread, which is not followed, or that its iterator is exhausted (None)."""
        if len(self._elsewhere) >= MOST_THREADS:
            self._elsewhere.clear()
        kept = self._elsewhere.setdefault(get_ident(), deque(maxlen=MOST_BATCHES))
        kept.append((weakref.ref(iterator), batch))

    def fetched_here(self) -> int:
        """Return a number that changes with each batch that the calling thread fetches, except from `usual`."""
        return self.fetched + len(self._elsewhere.get(get_ident(), ()))

    def adopt(self) -> None:
        """Add the batches that the calling thread has fetched before it was followed."""
        for iterator, batch in self._elsewhere.pop(get_ident(), ()):
            if batch is not None:
                self.add(iterator, batch)
            elif iterator() is not None:
                self.note_exhausted(iterator())

    def take(self) -> list[Batch]:
        """Return the batches of the step that ends now, and those withheld before."""
        self.end_usual()
        is_explained = self._take()
        self._forget()
        self._surplus = max(0, self._surplus - 1) if is_explained else self._surplus + 1
        if self._surplus >= MOST_SURPLUS:
            self._used = [UNKNOWN]
        elif not is_explained and (self._surplus > 1 or not self._has_explained):
            return []
        self._has_explained = self._has_explained or is_explained
        used, self._used = self._used, []
        return used

    def _take(self) -> bool:
        """Take the batches used since the last call. Return whether there were not more than passes."""
        passes, forward = self._passes(), self._forward()
        by_grad = self.gradients if passes == self.passes else 0
        count = int(passes - self.passes) or by_grad or 1
        self.passes, self.gradients = passes, 0
        fetching = [source for source in self.sources if source.fetched]
        current = [source for source in self.sources if source.is_current] or self._newest(count)
        # All of them, if a framework returns to training mode only after it has fetched the batch.
        current = [source for source in current if not source.in_evaluation] or current
        is_explained = all(len(source.fetched) <= count for source in current)
        # A step may use `grad` for something else, so that it says nothing of batches of several iterators.
        if by_grad and len(fetching) > 1:
            self._used.append(UNKNOWN)
        for source in current:
            if not source.explain(count, forward):
                self._used.append(UNKNOWN)
            self._used += source.take(count)
        return is_explained

    def _newest(self, passes: int) -> list[Source]:
        """Return the newest source, unless it was exhausted with more batches than backward passes."""
        return [source for source in self.sources[-1:] if not source.is_exhausted or len(source.fetched) <= passes]

    def _forget(self) -> None:
        self.sources = [source for source in self.sources if source.iterator() is not None]
        for source in self.sources:
            source.fetched.clear()
            source.tried = 0

    def _passes(self) -> float:
        """Return the number of backward passes so far."""
        return float(self._phases.slots[MICRO_STEPS])

    def _forward(self) -> float:
        """Return the seconds of forward passes so far."""
        return float(self._phases.seconds[FORWARD])
