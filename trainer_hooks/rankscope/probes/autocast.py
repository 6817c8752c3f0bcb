"""The type that autocast computes in, for the run's settings. Watched until the run has settled, then let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Note the type at each entry: nowhere else is it known once the forward pass is over."""

    @guard
    def note(context: Any) -> None:
        if context._enabled:  # noqa: SLF001 - no public question
            timeline.job.autocast = str(context.fast_dtype).removeprefix("torch.")

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            note(context)
            return original(context)

        return enter

    undo = replace(torch.autocast, "__enter__", watch)

    @guard
    def poll() -> None:
        if timeline.steps.count >= SETTLED_STEPS:
            undo()

    timeline.steps.polls.append(poll)
    return [undo, lambda: timeline.steps.polls.remove(poll)]
