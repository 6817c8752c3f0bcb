"""The optimizer and the step boundary: a step ends where the optimizer that marks the steps ends its own.

One optimizer marks them at a time (timeline/turns.py), so that two that alternate (a GAN's) do not count twice.
Optimizers that step within the backward pass, one a parameter, are one in this. Once the script calls
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
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.record.layout import BACKWARD, FORWARD, INDEX, OPTIMIZER
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import OPTIMIZER_STEP, SCRIPT
from rankscope.timeline.timeline import Timeline
from rankscope.timeline.turns import Turns

MICRO_STEPS = INDEX["micro_steps"]
BEGINNINGS = frozenset({FORWARD, BACKWARD})  # phases that a step may begin with
MOST_THREADS = 1024  # that are remembered


class WithinBackward:
    """Stands for all the optimizers that step within backward passes."""


WITHIN_BACKWARD = WithinBackward()


class StepMarker:
    """The pre and post hook of every optimizer in the process."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._steps = timeline.steps
        self._guard = guard
        self._open: dict[int, Phases | None] = {}
        self._count_turn = Turns(on_change=self._note_marking).count
        self._beside: set[int] = set()  # threads that train while another one does
        # The thread that stepped last of those that we do not follow, and our last event then.
        self._elsewhere = (0, 0.0)

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """Enter the phase, as the pre hook: unless this is within a backward pass, whose time it then is."""
        if is_dynamo_compiling() or self._guard.blown:
            return  # a compiled optimizer would be compiled anew at each of our changing values
        try:
            if self._timeline.open_phases[1] is not None and self._timeline.is_within((BACKWARD,)):
                # Perhaps on a thread of the autograd engine. Hundreds a step: their time stays the backward's.
                self._timeline.backward.on_optimizer_steps = self._after_backward
                return
            if self._open:
                self._close_raised(optimizer)
            self._open[id(optimizer)] = self._timeline.enter(OPTIMIZER) or self._enter_elsewhere()
        except BaseException as error:
            self._guard.disable(error)

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """The optimizer's step ends, and with it, for the optimizer that marks them, the training step."""
        if is_dynamo_compiling() or self._guard.blown:
            return
        try:
            opened = self._open.pop(id(optimizer), None)
            if opened is None:
                return
            self._timeline.leave(opened)
            steps = self._steps
            if steps.marker == SCRIPT:
                return
            # A tensor, from the scaler, during a fused optimizer's step.
            found = getattr(optimizer, "found_inf", None)
            if found is not None and was_skipped(found):
                return
            number = self._count_turn(optimizer, self._timeline.slots[MICRO_STEPS])
            if number and (steps.marker == OPTIMIZER_STEP or steps.take_over(OPTIMIZER_STEP)):
                steps.ended(number)
        except BaseException as error:
            self._guard.disable(error)

    def _note_marking(self, optimizer: Any) -> None:
        """Keep the optimizer that marks the steps, as the settings of the run are read from it."""
        if optimizer is not WITHIN_BACKWARD:
            self._timeline.job.objects["optimizer"] = weakref.ref(optimizer)

    def _after_backward(self) -> None:
        """A backward pass has ended in which optimizers stepped."""
        steps = self._steps
        self._timeline.backward.on_optimizer_steps = None
        if steps.marker == SCRIPT:
            return
        number = self._count_turn(WITHIN_BACKWARD, steps.micro_steps)
        if number:
            steps.marker = OPTIMIZER_STEP
            self._timeline.step(number)

    def follow(self, phase: int) -> bool:
        """Follow the training to another thread that begins a step where the one that we follow has ended one.

        The threads of a pool take turns like that. Those that train at the same time do not: of them one is followed.
        """
        thread = get_ident()
        if phase not in BEGINNINGS or thread in self._beside or not is_grad_enabled():
            return False
        if self._steps.is_between:
            self._timeline.adopt()
            return True
        if len(self._beside) < MOST_THREADS:
            self._beside.add(thread)
        return False

    def _enter_elsewhere(self) -> Phases | None:
        """Follow the training to another thread, if the one that we follow did nothing between two steps of this one.

        A notebook trains in one thread and then in another; two threads that both train do not take turns. Some
        frameworks train on a thread of their own: that is followed from its first step on.
        """
        timeline = self._timeline
        seen = get_ident(), timeline.last_event
        if self._steps.has_started and (seen != self._elsewhere or timeline.open_phases[1] is not None):
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
    timeline.follows = marker.follow
    return [handle.remove for handle in handles]
