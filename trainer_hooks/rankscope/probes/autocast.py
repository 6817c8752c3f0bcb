"""The data type of autocast, for the run's settings. Watched only during the first steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankscope.foreign import own_attribute
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.timeline.steps import SETTLED_STEPS
from rankscope.timeline.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Note the data type at each entry, because it is not known after the forward pass."""

    @guard
    def note(context: Any) -> None:
        if own_attribute(context, "_enabled"):
            timeline.job.autocast = str(own_attribute(context, "fast_dtype")).removeprefix("torch.")

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

    return [undo, timeline.steps.add_poll(poll)]
