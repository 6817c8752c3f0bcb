"""The backward pass: `loss.backward()` and `torch.autograd.backward`, which it ends in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the module attribute that `Tensor.backward` looks up at each call."""
    return [replace(torch.autograd, "backward", in_phase(timeline, guard, record.BACKWARD))]
