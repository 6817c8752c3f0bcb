"""Choice of the optimizer that marks the steps, if there are several.

The first optimizer that steps marks the steps. Others that step between two of its steps (a GAN's, or one for the
biases) are part of its step. If it does not step for more than twice its longest gap, it is no longer in use. Then the
next one that steps marks the steps, and its steps since the last marked one count.

Gaps are measured in backward passes; in a job without them, in steps of another optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import ceil
from typing import Any

PATIENCE_RATIO = 2  # of the longest gap
LEAST_PATIENCE = 8  # backward passes; an occasional longer gap changes nothing
FIRST_PATIENCE = 256  # as long as its gap is not known
UNKNOWN = -1  # as a gap: shorter than any


class Turns:
    """The optimizer that marks the steps, and the steps of the others since its last one."""

    def __init__(self, on_change: Callable[[Any], object]) -> None:
        self._on_change = on_change  # called with the new marking optimizer
        self._marking: Callable[[], Any] = lambda: None  # a weak reference
        self._marked_at = 0.0  # number of backward passes before its last step
        self._longest_gap: float = UNKNOWN  # largest number of passes between two of its steps
        self._waiting: dict[int, int] = {}  # steps of each other optimizer since then, by id

    def count(self, optimizer: Any, passes: float) -> int:
        """Return the number of training steps that end as `optimizer` steps after `passes` backward passes."""
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
        """Return whether the marking optimizer exists and may still step after this gap."""
        if self._marking() is None:
            return False
        if self._longest_gap == UNKNOWN:
            return gap <= FIRST_PATIENCE
        return gap <= max(PATIENCE_RATIO * self._longest_gap, LEAST_PATIENCE)
