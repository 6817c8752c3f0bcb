"""The backward pass: `loss.backward()` and `torch.autograd.backward`, which it ends in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankscope import record
from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.span import in_phase
from rankscope.timeline import Timeline


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Watch the module attribute that `Tensor.backward` looks up at each call."""
    return [replace(torch.autograd, "backward", not_while_compiling(in_phase(timeline, guard, record.BACKWARD)))]


def not_while_compiling(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`wrap`, but transparent while torch.compile traces: a clock read there would break the user's graph."""

    def wrap_eager(original: Callable[..., Any]) -> Callable[..., Any]:
        watched = wrap(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        return call

    return wrap_eager
