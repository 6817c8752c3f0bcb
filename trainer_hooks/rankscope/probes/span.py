"""The shape that most probes share: a call of the host's that means one phase from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.timeline import Timeline

Function = Callable[..., Any]
Done = Callable[[tuple[Any, ...], Any, float], None]

NEVER: frozenset[int] = frozenset()


def in_phase(
    timeline: Timeline, guard: Guard, phase: int, done: Done | None = None, *, unless_within: frozenset[int] = NEVER
) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call. Its errors are its own; those of the call pass untouched.

    `done` gets the call's arguments, its result and the seconds since the last event, if the call was one of the
    training thread's. Within any of the phases `unless_within` a call is left alone, as it is while torch.compile
    traces: reading a clock there would break the user's graph. It guards itself in place, without the guard's own
    wrapper, because it runs several times a step.
    """
    skip_call(timeline.enter)
    skip_call(timeline.leave)
    if done is not None:
        skip_call(done)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or guard.blown:
                return original(*args, **kwargs)
            if unless_within and not unless_within.isdisjoint(timeline.open_phases):
                return original(*args, **kwargs)
            depth, result = -1, None
            try:
                depth = timeline.enter(phase)
            except BaseException as error:
                guard.blow(error)
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                if depth > 0:
                    try:
                        seconds = timeline.leave(depth)
                        if done is not None:
                            done(args, result, seconds)
                    except BaseException as error:
                        guard.blow(error)

        return skip_frame(watched)

    return wrap
