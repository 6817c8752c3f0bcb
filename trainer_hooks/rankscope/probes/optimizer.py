"""The optimizer and the step boundary: a training step ends with the step of the optimizer that marks the steps.

One optimizer marks the steps at a time (timeline/turns.py), so two that alternate (a GAN's) do not count twice.
Optimizers that step within the backward pass, one per parameter, count as one. Once the script calls
`rankscope.step()`, only these calls end a step. A compiled optimizer step is rarely seen, a manual update never;
there each backward pass counts as a step after a while (timeline/steps.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import getattr_static
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

from rankscope.foreign import attribute, own_attribute
from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.probes.compiler import skip_call
from rankscope.record.layout import BACKWARD, COLLECTIVE_WAIT, FORWARD, INDEX, OPTIMIZER
from rankscope.timeline.phases import Phases
from rankscope.timeline.steps import OPTIMIZER_STEP, SCRIPT
from rankscope.timeline.timeline import Timeline

MICRO_STEPS = INDEX["micro_steps"]
FIRST_PHASES = frozenset({FORWARD, BACKWARD})  # that a step may begin with
MOST_THREADS = 1024  # remembered
MOST_REFUSALS = 8  # a thread that has just done its part of a step may not wait yet


class WithinBackward:
    """Represents all optimizers that step within backward passes."""


WITHIN_BACKWARD = WithinBackward()


class StepMarker:
    """The pre and post hook of every optimizer in the process."""

    def __init__(self, timeline: Timeline, guard: Guard) -> None:
        self._timeline = timeline
        self._steps = timeline.steps
        self._guard = guard
        self._open: dict[int, Phases | None] = {}
        self._count_turn = self._steps.turns.count
        self._steps.turns.on_change = self._note_marking
        # How often each thread began a part of a step while the followed one trained: it trains at the same time.
        self._refusals: dict[int, int] = {}
        self._left: tuple[int | None, int] = (None, 0)  # the thread followed before, and the number of steps then
        # The last thread that stepped without being followed, and the timeline's last event then.
        self._last_unfollowed = (0, 0.0)

    @skip_call
    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """Enter the phase, as the pre hook. A step inside a backward pass belongs to that pass."""
        if self._guard.disabled or is_dynamo_compiling():
            return  # a compiled optimizer would be recompiled at each changing value
        try:
            if self._timeline.open_phases[1] is not None and self._timeline.is_within((BACKWARD,)):
                # Perhaps on a thread of the autograd engine. Hundreds per step: their time stays the backward pass's.
                self._timeline.backward.on_optimizer_steps = self._after_backward
                return
            if self._open:
                self._close_failed(optimizer)
            self._open[id(optimizer)] = self._timeline.enter(OPTIMIZER) or self._enter_on_new_thread()
        except BaseException as error:
            self._guard.handle(error)

    @skip_call
    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - torch's signature
        """Leave the phase, as the post hook. If this optimizer marks the steps, end the training step."""
        if self._guard.disabled or is_dynamo_compiling():
            return
        try:
            opened = self._open.pop(id(optimizer), None)
            if opened is None:
                return
            self._timeline.leave(opened)
            steps = self._steps
            if steps.marker == SCRIPT:
                return
            # The scaler's tensor, set during a fused optimizer's step.
            found = own_attribute(optimizer, "found_inf")
            if found is not None and was_skipped(found):
                return
            number = self._count_turn(optimizer, self._timeline.slots[MICRO_STEPS])
            if number and (steps.marker == OPTIMIZER_STEP or steps.take_over(OPTIMIZER_STEP)):
                steps.end(number)
        except BaseException as error:
            self._guard.handle(error)

    def _note_marking(self, optimizer: Any) -> None:
        """Keep the optimizer that marks the steps, for the settings of the run, and the device of its parameters."""
        if optimizer is not WITHIN_BACKWARD:
            self._timeline.job.keep_optimizer(optimizer)

    def _after_backward(self) -> None:
        """End the training step after a backward pass in which optimizers stepped."""
        steps = self._steps
        self._timeline.backward.on_optimizer_steps = None
        if steps.marker == SCRIPT:
            return
        number = self._count_turn(WITHIN_BACKWARD, steps.micro_steps)
        if number:
            steps.marker = OPTIMIZER_STEP
            self._timeline.step(number)

    def follow(self, phase: int) -> bool:
        """Follow the training to another thread that begins a step after the followed thread has ended one.

        Also if it begins another part of a step while the followed thread waits. The threads of a pool alternate like
        that. Threads that train at the same time do not; one of them is followed. A thread that has made no step since
        is left again.
        """
        if phase == COLLECTIVE_WAIT:  # the followed thread waits for a thread that waits for other ranks
            return self._timeline.is_waiting_for_thread
        thread = get_ident()
        refusals, timeline, steps = self._refusals.get(thread, 0), self._timeline, self._steps
        if phase not in FIRST_PHASES or refusals >= MOST_REFUSALS or not is_grad_enabled():
            return False
        returns = timeline.open_phases[1] is None and self._left == (thread, steps.count)
        if returns or steps.is_between or timeline.is_waiting_for_thread:
            self._left = timeline.adopt(), steps.count
            return True
        if refusals or len(self._refusals) < MOST_THREADS:
            self._refusals[thread] = refusals + 1
        return False

    def _enter_on_new_thread(self) -> Phases | None:
        """Follow the training to this thread if the followed thread did nothing between two steps of this one.

        Also if it waits for a thread. A notebook trains in one thread and later in another. A framework's own training
        thread is followed from its first step on. Of two threads that train at the same time, one is followed.
        """
        timeline = self._timeline
        seen = get_ident(), timeline.last_event
        is_active = seen != self._last_unfollowed or timeline.open_phases[1] is not None
        if self._steps.has_started and is_active and not timeline.is_waiting_for_thread:
            self._last_unfollowed = seen
            return None
        timeline.adopt()
        return timeline.enter(OPTIMIZER)

    def _close_failed(self, beginning: Optimizer) -> None:
        """Close steps that raised and so never ended, when the next begins, unless that one is nested in them."""
        running = running_steps(beginning)
        for key, opened in list(self._open.items()):
            if key == id(beginning) or key not in running:
                del self._open[key]
                self._timeline.leave(opened)


def was_skipped(found: torch.Tensor) -> bool:
    """Return whether a fused optimizer's step did nothing because the GradScaler `found` a non-finite gradient.

    False if only a GPU knows: reading the value would block the host. amp.py finds out later.
    """
    return type(found) is torch.Tensor and found.is_cpu and bool(found.item())


def running_steps(beginning: Optimizer) -> set[int]:
    """Return the ids of the optimizers whose steps are running in this thread, including `beginning`."""
    hooked = attribute(
        getattr_static(type(beginning), "step", None), "__code__"
    )  # torch's wrapper, one function for all optimizers
    ids = set()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented name
    while frame is not None:
        if frame.f_code is hooked:
            ids.add(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return ids


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Register global optimizer hooks (torch ≥ 2.0), which see every optimizer."""
    marker = StepMarker(timeline, guard)
    before: Any = marker.before
    after: Any = marker.after
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    timeline.follows = marker.follow
    return [handle.remove for handle in handles]
