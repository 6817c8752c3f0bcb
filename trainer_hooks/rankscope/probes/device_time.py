"""The GPU's time by phase, if torch was built for CUDA or ROCm: the device clock's access to torch.cuda.

It calls nothing before the job has initialized CUDA: a call initializes the driver, and then the process cannot fork
ranks or loader workers that use CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from rankscope.guard import Guard
from rankscope.patch import Undo, replace
from rankscope.probes.compiler import skip_frame
from rankscope.probes.span import Arguments, Function, around
from rankscope.timeline.device_clock import DeviceClock, Event
from rankscope.timeline.phases import Phases
from rankscope.timeline.timeline import Job, Timeline


class Cuda:
    """torch.cuda, which is also ROCm's. Other accelerators have no query for a running capture."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def is_in_use(self) -> bool:
        """Return whether CUDA is initialized. False also in a child forked after that."""
        return bool(torch.cuda.is_initialized())

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream; in an autograd callback that of the caller of backward.

        It is a stream of the device that the job trains on, which is the current one until that is known.
        """
        return torch.cuda.current_stream(self._job.device)

    def new_event(self) -> Event:
        """Return an event with timing enabled."""
        event: Event = torch.cuda.Event(enable_timing=True)
        return event


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Start the clock. Does nothing in a CPU build of torch."""
    if not torch.backends.cuda.is_built():
        return []
    clock = DeviceClock(timeline, guard, Cuda(timeline.job))
    clock.start()
    # A stream's wait_event, wait_stream and record_event all call these two, which torch looks up at each call.
    return [
        clock.stop,
        replace(torch.cuda.Event, "record", _record(clock, guard)),
        replace(torch.cuda.Event, "wait", _wait(clock, timeline, guard)),
    ]


def _record(clock: DeviceClock, guard: Guard) -> Callable[[Function], Function]:
    """Wrap an event's record: note its stream, in measured steps and the steps before them."""
    streams = clock.streams

    def wrap(original: Function) -> Function:
        def watched(event: Any, stream: Any = None) -> Any:
            if streams.are_watched and not guard.disabled and not is_dynamo_compiling():
                try:
                    streams.note_event(event, torch.cuda.current_stream() if stream is None else stream)
                except BaseException as error:
                    guard.handle(error)
            return original(event, stream)

        return skip_frame(watched)

    return wrap


def _wait(clock: DeviceClock, timeline: Timeline, guard: Guard) -> Callable[[Function], Function]:
    """Wrap a stream's wait for an event: in measured steps, mark waits for other ranks and for batches."""
    streams = clock.streams

    def begin(args: Arguments, _kwargs: dict[str, Any]) -> Phases | None:
        event, stream = args
        phase = streams.phase_of_wait(event, torch.cuda.current_stream() if stream is None else stream)
        if phase is None:
            return None
        streams.main_waits = True
        opened = timeline.enter(phase)
        streams.main_waits = False
        return opened

    def end(opened: Phases, _args: Arguments, _result: Any, _returned: bool) -> None:
        timeline.leave(opened)

    def wrap(original: Function) -> Function:
        in_measured_step = around(guard, begin, end)(original)

        def watched(event: Any, stream: Any = None) -> Any:
            return (original if clock.measured is None else in_measured_step)(event, stream)

        return skip_frame(watched)

    return wrap
