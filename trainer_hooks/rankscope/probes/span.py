"""The shape that most probes share: a call of the host's that means one phase from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from rankscope.guard import Guard
from rankscope.timeline import Timeline

Function = Callable[..., Any]


def in_phase(timeline: Timeline, guard: Guard, phase: int) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call. Its errors are its own; those of the call pass untouched.

    It guards itself in place, without the guard's wrapper, because it runs several times a step. While
    torch.compile traces it is transparent: reading a clock there would break the user's graph.
    """
    enter, leave = timeline.enter, timeline.leave

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.blown or is_compiling():
                return original(*args, **kwargs)
            depth = -1
            try:
                depth = enter(phase)
            except Exception as error:
                guard.blow(error)
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    leave(depth)
                except Exception as error:
                    guard.blow(error)

        return watched

    return wrap
