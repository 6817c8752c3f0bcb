"""The backward pass: `loss.backward()` and `torch.autograd.backward`, which it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.timeline import Timeline

# A backward pass within another is part of it: reentrant activation checkpointing runs one for each of its segments.
NOT_WITHIN = frozenset({record.BACKWARD})


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the module attribute that `Tensor.backward` looks up at each call."""

    def count(_call: tuple[Any, ...], _result: object, _seconds: float) -> None:
        timeline.micro_step()

    backward = in_phase(timeline, guard, record.BACKWARD, count, unless_within=NOT_WITHIN)
    return [replace(torch.autograd, "backward", backward)]
