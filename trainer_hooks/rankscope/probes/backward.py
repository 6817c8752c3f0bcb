"""The backward pass: `loss.backward()`, `torch.autograd.backward`, and gradients by `torch.autograd.grad`.

Each outermost call of the first two is a micro-step. A gradient penalty's `grad` is none, nor is the segment that
reentrant activation checkpointing runs backward within the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.record import PLACES
from rankscope.timeline import Timeline

MICRO_STEPS = PLACES["micro_steps"]
NOT_WITHIN = frozenset({record.BACKWARD})


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the module attributes that are looked up at each call."""

    def count(_call: tuple[Any, ...], _result: object, _seconds: float) -> None:
        timeline.writer.slots[MICRO_STEPS] += 1
        if timeline.steps_in_backward:
            timeline.step_in_backward()

    backward = in_phase(timeline, guard, record.BACKWARD, count, unless_within=NOT_WITHIN)
    undo = [replace(torch.autograd, "backward", backward)]
    # What `grad` runs, too. Not `grad` itself: torch.compile knows that by its identity and takes it into the graph.
    if hasattr(torch.autograd, "_engine_run_backward"):
        engine = in_phase(timeline, guard, record.BACKWARD, unless_within=NOT_WITHIN)
        undo.append(replace(torch.autograd, "_engine_run_backward", engine))
    return undo
