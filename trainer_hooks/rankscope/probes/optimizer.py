"""The optimizer and the step boundary: a step ends where the first optimizer that was seen ends its step.

One optimizer marks the steps, so that two that alternate (a GAN's) do not count twice; once the script calls
`rankscope.step()`, only that does. An optimizer step that torch.compile compiles is not seen: call it there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.timeline import Depth, Timeline


class StepMarker:
    """The pre and post hook of every optimizer in the process."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._open: dict[int, Depth] = {}
        self._marking: weakref.ref[Optimizer] | None = None

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """The optimizer's step begins. A step that raised never ended: it is closed first."""
        if is_dynamo_compiling():
            return  # a compiled optimizer would be compiled anew at each of our changing values
        if self._timeline.steps == 0:
            self._timeline.adopt()  # some frameworks train on a thread of their own
        if id(optimizer) in self._open:
            self._timeline.leave(self._open[id(optimizer)])
        self._open[id(optimizer)] = self._timeline.enter(record.OPTIMIZER)

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """The optimizer's step ends, and with it, for the optimizer that marks them, the training step."""
        if is_dynamo_compiling():
            return
        depth = self._open.pop(id(optimizer), -1)
        self._timeline.leave(depth)
        if depth > 0 and self._marks(optimizer):
            self._timeline.step()

    def _marks(self, optimizer: Optimizer) -> bool:
        if self._timeline.steps_are_explicit:
            return False
        marking = self._marking() if self._marking else None
        if marking is None:
            self._marking, marking = weakref.ref(optimizer), optimizer
            self._timeline.seen["optimizer"] = self._marking
        return marking is optimizer


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Register global optimizer hooks (torch ≥ 2.0), which see every optimizer, made before or after."""
    marker = StepMarker(timeline)
    before: Any = guard(marker.before)
    after: Any = guard(marker.after)
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    return [handle.remove for handle in handles]
