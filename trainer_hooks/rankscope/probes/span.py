"""Wrappers that most probes share: they run code of the hook before and after a call of the job.

An error in that code goes to the probe's guard, and the call goes on. An error of the call is raised unchanged. While
torch.compile traces, the wrappers do nothing: reading a clock there would break the user's graph.
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
Done = Callable[[Arguments, Any], object]

NEVER: frozenset[int] = frozenset()


# The fast path has this inline, in `in_phase` below and in `_issue` and `_wait` of collectives.py: two more calls would
# add 56 ns to the 730 of a phase, and 124 to the 2,120 of a collective's issue, with warm caches.
def around(
    guard: Guard,
    begin: Callable[[Arguments, dict[str, Any]], Call | None],
    end: Callable[[Call, Arguments, Any, bool], None],
) -> Callable[[Function], Function]:
    """Return a wrapper that calls `begin` before a call and, unless that returns None, `end` after it.

    `end` gets the result of `begin`, the call's positional arguments, its result, and whether it returned.
    """
    skip_call(begin)
    skip_call(end)

    def wrap(original: Function) -> Function:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.disabled or is_dynamo_compiling():
                return original(*args, **kwargs)
            result, returned = None, False
            try:
                call = begin(args, kwargs)
            except BaseException as error:
                guard.handle(error)
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
                        guard.handle(error)

        return skip_frame(watched)

    return wrap


def in_phase(
    timeline: Timeline,
    guard: Guard,
    phase: int,
    done: Done | None = None,
    *,
    missed: Done = lambda _args, _result: None,
    unless_within: frozenset[int] = NEVER,
    left_alone: Callable[[Function], Function] = lambda original: original,
) -> Callable[[Function], Function]:
    """Return a wrapper that opens `phase` around a call.

    `done` gets the call's arguments and its result (None if it raised) on the training thread, `missed` on others. In
    any of the phases `unless_within`, the call goes through the wrapper `left_alone` instead.
    """
    skip_call(timeline.enter)
    skip_call(timeline.leave)
    skip_call(timeline.is_within)
    skip_call(missed)
    if done is not None:
        skip_call(done)

    def wrap(original: Function) -> Function:
        within = left_alone(original)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if guard.disabled or is_dynamo_compiling():
                return original(*args, **kwargs)
            if timeline.open_phases[1] is not None and timeline.is_within(unless_within):
                return within(*args, **kwargs)
            result = None
            try:
                opened = timeline.enter(phase)
            except BaseException as error:
                guard.handle(error)
                opened = None
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                try:
                    if opened is not None:
                        timeline.leave(opened)
                        if done is not None:
                            done(args, result)
                    else:
                        missed(args, result)
                except BaseException as error:
                    guard.handle(error)

        return skip_frame(watched)

    return wrap
