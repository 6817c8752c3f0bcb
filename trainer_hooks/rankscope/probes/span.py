"""The shape that most probes share: a call of the host's that means one phase from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope.guard import Guard
from rankscope.timeline import Timeline

Function = Callable[..., Any]


def in_phase(timeline: Timeline, guard: Guard, phase: int) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call. Its errors are its own; those of the call pass untouched."""
    enter, leave = guard(timeline.enter), guard(timeline.leave)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            depth = enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                if depth is not None:
                    leave(depth)

        return watched

    return wrap
