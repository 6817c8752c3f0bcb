"""Which of several optimizers marks the steps, and what happens when another one takes over.

The first optimizer that steps marks the steps. Others that step between two of its steps (a GAN's, or one for the
biases) belong to its step. An optimizer is out of use when it has not stepped for longer than twice its longest gap.
Then the one that steps marks the steps, and its steps since then count.

Gaps are counted in backward passes. Where a job makes none, the steps of another optimizer stand for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import ceil
from typing import Any

PATIENCE_RATIO = 2  # of the longest gap
LEAST_PATIENCE = 8  # a gap that is seldom longer than usual makes no change
FIRST_PATIENCE = 256  # until the optimizer has stepped twice and its gap is known
UNKNOWN = -1  # a gap, until then: shorter than any


class Turns:
    """The optimizer that marks the steps, and the steps of the others since its last one."""

    def __init__(self, on_change: Callable[[Any], object]) -> None:
        self._on_change = on_change  # called with the optimizer that marks the steps from now on
        self._marking: Callable[[], Any] = lambda: None  # a weak reference
        self._marked_at = 0.0  # how many backward passes had ended at its last step
        self._longest_gap: float = UNKNOWN  # the most passes between two of its steps
        self._waiting: dict[int, int] = {}  # the steps of each other optimizer since then, by its id

    def count(self, optimizer: Any, passes: float) -> int:
        """Return how many training steps end as `optimizer` steps after so many backward passes."""
        if self._marking() is optimizer:
            if passes - self._marked_at > self._longest_gap or self._waiting:
                self._learn_gap(passes)
            self._marked_at = passes
            return 1
        waiting = self._waiting[id(optimizer)] = self._waiting.get(id(optimizer), 0) + 1
        gap = max(passes - self._marked_at, waiting)
        if self._is_in_use(gap):
            return 0
        self._longest_gap = UNKNOWN if waiting == 1 else ceil(gap / waiting)
        self._marking = weakref.ref(optimizer)
        self._marked_at = passes
        self._waiting.clear()
        self._on_change(optimizer)
        return waiting

    def _learn_gap(self, passes: float) -> None:
        gap = max(passes - self._marked_at, 1, *self._waiting.values())
        self._longest_gap = max(self._longest_gap, gap)
        self._waiting.clear()

    def _is_in_use(self, gap: float) -> bool:
        """Whether the optimizer that marks the steps exists and may still step, after a gap that has lasted so long."""
        if self._marking() is None:
            return False
        if self._longest_gap == UNKNOWN:
            return gap <= FIRST_PATIENCE
        return gap <= max(PATIENCE_RATIO * self._longest_gap, LEAST_PATIENCE)
