"""The shape that most probes share: a call of the host's that means one phase from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.probes.compiler import skip_call, skip_frame
from rankscope.record import ABSORBING
from rankscope.timeline import NOBODY, PHASE, PHASE_SECONDS, PHASE_SINCE, Timeline

Function = Callable[..., Any]
Done = Callable[[tuple[Any, ...], Any, float], None]

NEVER: frozenset[int] = frozenset()


def in_phase(  # noqa: C901 - a call of our own costs a microsecond here, where the model's work has emptied the caches
    timeline: Timeline, guard: Guard, phase: int, done: Done | None = None, *, unless_within: frozenset[int] = NEVER
) -> Callable[[Function], Function]:
    """A wrapper that opens `phase` around a call. Its errors are its own; those of the call pass untouched.

    `done` gets the call's arguments, its result and the seconds since the last event, if the call was one of the
    training thread's. Within any of the phases `unless_within` a call is left alone, as it is while torch.compile
    traces: reading a clock there would break the user's graph. It guards itself in place, without the guard's own
    wrapper, and is `Timeline.enter` and `Timeline.leave` written out, because it runs several times a step.
    """
    skip_call(timeline.enter)  # as other probes call them
    skip_call(timeline.leave)
    if done is not None:
        skip_call(done)
    clock, place, absorbs = timeline.clock, PHASE_SECONDS + phase, phase in ABSORBING

    def wrap(original: Function) -> Function:  # noqa: C901 - likewise
        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: C901 - likewise
            if is_dynamo_compiling() or guard.blown:
                return original(*args, **kwargs)
            stack = timeline.open_phases
            if unless_within and not unless_within.isdisjoint(stack):
                return original(*args, **kwargs)
            depth, result = -1, None
            try:
                if get_ident() == timeline.owner:
                    if timeline.on_event is not None:
                        timeline.on_event(phase)
                    now = clock()
                    slots = timeline.writer.slots
                    slots[timeline.open_slot] += now - timeline.last_event
                    timeline.last_event = now
                    depth = len(stack)
                    stack.append(phase)
                    if timeline.absorber == NOBODY:
                        if absorbs:
                            timeline.absorber, timeline.absorber_depth = phase, depth
                        slots[PHASE] = phase
                        slots[PHASE_SINCE] = now
                        timeline.open_slot = place
                        if timeline.on_boundary is not None:
                            timeline.on_boundary(phase)
            except BaseException as error:
                guard.blow(error)
            try:
                result = original(*args, **kwargs)
                return result
            finally:
                try:
                    stack, seconds = timeline.open_phases, 0.0
                    if 0 < depth < len(stack):
                        now = clock()
                        seconds = now - timeline.last_event
                        slots = timeline.writer.slots
                        slots[timeline.open_slot] += seconds
                        timeline.last_event = now
                        del stack[depth:]  # from here on without a call, after which Ctrl-C might come in between
                        if timeline.absorber_depth >= depth:
                            timeline.absorber = timeline.absorber_depth = NOBODY
                        if timeline.absorber == NOBODY:
                            slots[PHASE] = outer = stack[-1]
                            slots[PHASE_SINCE] = now
                            timeline.open_slot = PHASE_SECONDS + outer
                            if timeline.on_boundary is not None:
                                timeline.on_boundary(outer)
                    if done is not None and depth > 0:
                        done(args, result, seconds)
                except BaseException as error:
                    guard.blow(error)

        return skip_frame(watched)

    return wrap
