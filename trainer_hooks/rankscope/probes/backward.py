"""The backward pass: `loss.backward()`, `torch.autograd.backward` and `torch.autograd.grad`.

Each outermost call of the first two is a micro-step, and also a step if nothing else marks steps for long. A gradient
penalty's `grad` is not, and neither is a backward pass of reentrant activation checkpointing inside another one. In a
step with calls of `grad` alone, their number shows how many batches it used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.compiler import skip_frame
from rankscope.probes.span import Function, in_phase
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.timeline.timeline import Timeline

MICRO_STEPS = INDEX["micro_steps"]
NOT_WITHIN = frozenset({layout.BACKWARD})


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the function that all three run (torch ≥ 2.3). torch looks it up in its module at each call.

    `grad` itself is not watched: torch.compile recognizes it by identity and traces it into the graph. `backward` is
    not either: that would add a second wrapper to every step.
    """

    passes, steps = timeline.backward, timeline.steps

    def count(_call: tuple[Any, ...], gradients: object) -> None:
        if passes.on_end is not None:
            passes.on_end()
        if gradients:  # only `grad` returns gradients
            steps.batches.gradients += 1
            return
        number = timeline.slots[MICRO_STEPS] + 1
        timeline.slots[MICRO_STEPS] = number
        if passes.on_optimizer_steps is not None:
            passes.on_optimizer_steps()
        elif number > steps.check_after:
            steps.check_pass(timeline.job.is_in_evaluation_mode())

    def nested(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            passes.nested += 1
            try:
                return original(*args, **kwargs)
            finally:
                passes.nested -= 1

        return skip_frame(watched)

    watch = in_phase(timeline, guard, layout.BACKWARD, count, unless_within=NOT_WITHIN, left_alone=nested)
    return [replace(torch.autograd, "_engine_run_backward", watch)]
