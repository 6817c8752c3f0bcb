"""The optimizer and the step boundary: a step ends where the optimizer that marks the steps ends its own.

One optimizer marks them, the first that was seen, so that two that alternate (a GAN's) do not count twice. Optimizers
that step within the backward pass, one a parameter, make one step a backward. Once the script calls
`rankscope.step()`, only that does. An optimizer step that torch.compile compiles is not seen, nor is an update by hand:
there each backward pass counts as a step after a while (timeline/steps.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.record.layout import BACKWARD, OPTIMIZER
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import OPTIMIZER_STEP, SCRIPT
from rankscope.timeline.timeline import Timeline

# Backward passes after which an optimizer that marked the steps is no longer in use: more than a GAN's critic takes
# between two steps of its generator, or an accumulation between two of anybody.
PATIENCE = 256


class StepMarker:
    """The pre and post hook of every optimizer in the process."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._steps = timeline.steps
        self._guard = guard
        self._open: dict[int, Phases | None] = {}
        self._marking: weakref.ref[Optimizer] | None = None
        # The thread that stepped last of those that we do not follow, and our last event then.
        self._elsewhere = (0, 0.0)
        self._last_steps = self._micro_steps_then = 0  # when an optimizer that marks none stepped after a new step

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """Enter the phase, as the pre hook: unless this is within a backward pass, whose time it then is."""
        if is_dynamo_compiling() or self._guard.blown:
            return  # a compiled optimizer would be compiled anew at each of our changing values
        timeline = self._timeline
        try:
            if timeline.open_phases[1] is not None and timeline.is_within((BACKWARD,)):
                # Perhaps on a thread of the autograd engine. Hundreds a step: their time stays the backward's.
                timeline.backward.steps_optimizers = self._marking is None
                return
            if not self._steps.has_started:
                timeline.adopt()  # some frameworks train on a thread of their own
            if self._open:
                self._close_raised(optimizer)
            self._open[id(optimizer)] = timeline.enter(OPTIMIZER) or self._enter_elsewhere()
        except BaseException as error:
            self._guard.blow(error)

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """The optimizer's step ends, and with it, for the optimizer that marks them, the training step."""
        if is_dynamo_compiling() or self._guard.blown:
            return
        timeline = self._timeline
        try:
            opened = self._open.pop(id(optimizer), None)
            timeline.leave(opened)
            # The usual case first, without a call: it is the optimizer that marks the steps.
            is_marking = self._marking is not None and self._marking() is optimizer
            steps = self._steps
            if opened and steps.marker != SCRIPT and (is_marking or self._may_mark(optimizer)):
                counts = steps.marker == OPTIMIZER_STEP or steps.take_over(OPTIMIZER_STEP)
                # A tensor, from the scaler, during a fused optimizer's step.
                found = getattr(optimizer, "found_inf", None)
                if counts and (found is None or not was_skipped(found)):
                    steps.ended()
        except BaseException as error:
            self._guard.blow(error)

    def _enter_elsewhere(self) -> Phases | None:
        """Follow the training to another thread, if the one that we follow did nothing between two steps of this one.

        A notebook trains in one thread and then in another; two threads that both train do not take turns.
        """
        timeline = self._timeline
        seen = get_ident(), timeline.last_event
        if seen != self._elsewhere or timeline.open_phases[1] is not None:
            self._elsewhere = seen
            return None
        timeline.adopt()
        return timeline.enter(OPTIMIZER)

    def _close_raised(self, beginning: Optimizer) -> None:
        """A step that raised never ended: it is closed when the next begins, unless that one is within it."""
        running = running_steps(beginning)
        for key, opened in list(self._open.items()):
            if key == id(beginning) or key not in running:
                del self._open[key]
                self._timeline.leave(opened)

    def _may_mark(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer than the last one marks the steps from now on: that is gone, or out of use."""
        marking = self._marking() if self._marking else None
        if marking is not None and not self._is_out_of_use():
            return False
        self._marking = self._timeline.job.objects["optimizer"] = weakref.ref(optimizer)
        return True

    def _is_out_of_use(self) -> bool:
        """Whether the optimizer that marks the steps has marked none for a long time, in which others stepped."""
        steps, micro_steps = self._steps.count, self._steps.micro_steps
        if steps != self._last_steps:
            self._last_steps, self._micro_steps_then = steps, micro_steps
        return micro_steps - self._micro_steps_then > PATIENCE


def was_skipped(found: torch.Tensor) -> bool:
    """Whether a fused optimizer's step did nothing because the GradScaler `found` a gradient that is not finite.

    False where only a GPU knows: asking it would make the host wait. amp.py finds out later.
    """
    return found.device.type == "cpu" and bool(found.item())


def running_steps(beginning: Optimizer) -> set[int]:
    """The ids of the optimizers whose steps are running in this thread, that of `beginning` among them."""
    hooked = getattr(type(beginning).step, "__code__", None)  # torch's wrapper, one function for all optimizers
    ids = set()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    while frame is not None:
        if frame.f_code is hooked:
            ids.add(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return ids


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Register global optimizer hooks (torch ≥ 2.0), which see every optimizer, made before or after."""
    marker = StepMarker(timeline, guard)
    before: Any = marker.before
    after: Any = marker.after
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    return [handle.remove for handle in handles]
