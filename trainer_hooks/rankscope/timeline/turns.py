"""Choice of the optimizer that marks the steps, if there are several.

The first optimizer that steps marks the steps. Others that step between two of its steps (a GAN's, or one for the
biases) are part of its step. If it does not step for more than twice its longest gap, it is no longer in use. Then the
next one that steps marks the steps. Its steps since the last marked one count, and those of optimizers that were in use
before it: models that are trained in turn may each have few steps.

Gaps are measured in backward passes; in a job without them, in steps of another optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from rankscope.record.layout import PASSES_WITHOUT_STEP

PATIENCE_RATIO = 2  # of the longest gap
LEAST_PATIENCE = 8  # backward passes; an occasional longer gap changes nothing
FIRST_PATIENCE = 256  # as long as its gap is not known
UNKNOWN = -1  # as a gap: shorter than any


@dataclass(slots=True)
class Stage:
    """The steps of another optimizer since the last marked one. `first` and `last` count the steps of all others."""

    first: int
    last: int
    steps: int


class Turns:
    """The optimizer that marks the steps, and the steps of the others since its last one."""

    def __init__(self) -> None:
        self.on_change: Callable[[Any], object] = lambda _: None  # called with the new marking optimizer
        self.restart()

    def restart(self) -> None:
        """Forget the optimizers of the process that this one was forked from."""
        self._marking: Callable[[], Any] = lambda: None  # a weak reference
        self._marked_at = 0.0  # number of backward passes before its last step
        self._longest_gap: float = UNKNOWN  # largest number of passes between two of its steps
        self._others: dict[int, Stage] = {}  # steps of each other optimizer since then, by id
        self._others_number = 0  # of these steps
        self._others_at = 0.0  # number of backward passes before the last of them
        self._companions: set[int] = set()  # others that stepped between two of its steps

    def count(self, optimizer: Any, passes: float) -> int:
        """Return the number of training steps that end as `optimizer` steps after `passes` backward passes."""
        if self._marking() is optimizer:
            if passes - self._marked_at > self._longest_gap or self._others:
                self._learn_gap(passes)
            self._marked_at = passes
            return 1
        stage = self._note_other(id(optimizer), passes)
        gap = max(passes - self._marked_at, stage.steps)
        if self._is_in_use(gap):
            return 0
        number = stage.steps + self._steps_before(stage)
        # A loop that accumulates over many passes has been counted by its passes up to now.
        is_known = stage.steps > 1 or gap > PASSES_WITHOUT_STEP
        self._longest_gap = ceil(gap / stage.steps) if is_known else UNKNOWN
        self._marking = weakref.ref(optimizer)
        self._marked_at = passes
        self._others.clear()
        self._companions.clear()
        self.on_change(optimizer)
        return number

    def passes_without_step(self, passes: float) -> float:
        """Return how many backward passes have ended since the last step of any optimizer."""
        return passes - max(self._marked_at, self._others_at)

    def may_still_step(self, passes: float) -> bool:
        """Return whether these passes may be one step of the marking optimizer, which accumulates that many."""
        return passes <= max(PATIENCE_RATIO * self._longest_gap, PASSES_WITHOUT_STEP)

    def ignore_passes(self, passes: float) -> None:
        """Treat the backward passes up to now as if an optimizer had stepped after them."""
        self._others_at = passes

    def _note_other(self, key: int, passes: float) -> Stage:
        self._others_at = passes
        self._others_number = number = self._others_number + 1
        stage = self._others.get(key)
        if stage is None:
            stage = self._others[key] = Stage(number, number, 1)
        else:
            stage.last = number
            stage.steps += 1
        return stage

    def _steps_before(self, stage: Stage) -> int:
        """Return the steps of the others that ended before this stage, one after the other.

        Of others that alternate, one counts. Those of the last marking optimizer belong to its step.
        """
        number, first = 0, stage.first
        before = [other for key, other in self._others.items() if key not in self._companions]
        for other in sorted(before, key=lambda other: -other.last):
            if other.last < first:
                number += other.steps
                first = other.first
        return number

    def _learn_gap(self, passes: float) -> None:
        gap = max(passes - self._marked_at, 1, *(other.steps for other in self._others.values()))
        self._longest_gap = max(self._longest_gap, gap)
        self._companions = set(self._others)
        self._others.clear()

    def _is_in_use(self, gap: float) -> bool:
        """Return whether the marking optimizer exists and may still step after this gap."""
        if self._marking() is None:
            return False
        if self._longest_gap == UNKNOWN:
            return gap <= FIRST_PATIENCE
        return gap <= max(PATIENCE_RATIO * self._longest_gap, LEAST_PATIENCE)
