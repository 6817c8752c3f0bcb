"""The shape that most probes share: a call of the host's, with a beginning and an end of ours around it.

Errors of the beginning and the end are their own: they blow the guard, and the call goes on. Those of the call pass
untouched. While torch.compile traces, nothing is done: reading a clock there would break the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.timeline.timeline import Timeline

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Call = TypeVar("Call")
Done = Callable[[Arguments, Any], None]

NEVER: frozenset[int] = frozenset()


# The fast path has it written out, in `in_phase` below and `_issue` and `_wait` of collectives.py: its two calls more
# are 56 ns on the 730 of a phase and 124 on the 2,120 of a collective's issue, with warm caches.
def around(
    guard: Guard,
    begin: Callable[[Arguments, dict[str, Any]], Call | None],
    end: Callable[[Call, Arguments, Any, bool], None],
) -> Callable[[Function], Function]:
    """A wrapper that calls `begin` with a call's arguments and, unless that gave None, `end` after it.

    `end` gets what `begin` gave, the call's positional arguments, its result, and whether it returned at all.
    """
    skip_call(begin)
    skip_call(end)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.blown or is_dynamo_compiling():
                return original(*args, **kwargs)
            result, returned = None, False
            try:
                call = begin(args, kwargs)
            except BaseException as error:
                guard.disable(error)
                call = None
            try:
                result = original(*args, **kwargs)
                returned = True
                return result
            finally:
                if call is not None:
                    try:
                        end(call, args, result, returned)
                    except BaseException as error:
                        guard.disable(error)

        return skip_frame(watched)

    return wrap


def in_phase(
    timeline: Timeline,
    guard: Guard,
    phase: int,
    done: Done | None = None,
    *,
    unless_within: frozenset[int] = NEVER,
    left_alone: Callable[[Function], Function] = lambda original: original,
) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call.

    `done` gets the call's arguments and its result, None if it raised, if the call was one of the training thread's.
    Within any of the phases `unless_within` a call is left alone, in the wrapper `left_alone`.
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
            result = None
            try:
                opened = timeline.enter(phase)
            except BaseException as error:
                guard.disable(error)
                opened = None
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                if opened is not None:
                    try:
                        timeline.leave(opened)
                        if done is not None:
                            done(args, result)
                    except BaseException as error:
                        guard.disable(error)

        return skip_frame(watched)

    return wrap
