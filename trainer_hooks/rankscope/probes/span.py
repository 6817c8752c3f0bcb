"""The shape that most probes share: a call of the host's that means one phase from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.timeline.timeline import Timeline

Function = Callable[..., Any]
Done = Callable[[tuple[Any, ...], Any, float], None]

NEVER: frozenset[int] = frozenset()


def in_phase(
    timeline: Timeline,
    guard: Guard,
    phase: int,
    done: Done | None = None,
    *,
    unless_within: frozenset[int] = NEVER,
    left_alone: Callable[[Function], Function] = lambda original: original,
) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call. Its errors are its own; those of the call pass untouched.

    `done` gets the call's arguments, its result and the seconds since the last event, if the call was one of the
    training thread's. Within any of the phases `unless_within` a call is left alone, in the wrapper `left_alone`; while
    torch.compile traces it is, too: reading a clock there would break the user's graph. It guards itself in place,
    without the guard's own wrapper, because it runs several times a step.
    """
    skip_call(timeline.enter)
    skip_call(timeline.leave)
    skip_call(timeline.is_within)
    if done is not None:
        skip_call(done)

    def wrap(original: Function) -> Function:
        within = left_alone(original)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or guard.blown:
                return original(*args, **kwargs)
            if timeline.open_phases[1] is not None and timeline.is_within(unless_within):
                return within(*args, **kwargs)
            opened = result = None
            try:
                opened = timeline.enter(phase)
            except BaseException as error:
                guard.blow(error)
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                if opened is not None:
                    try:
                        seconds = timeline.leave(opened)
                        if done is not None:
                            done(args, result, seconds)
                    except BaseException as error:
                        guard.blow(error)

        return skip_frame(watched)

    return wrap
