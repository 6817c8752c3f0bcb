"""The GPU's time by phase, where torch was built for CUDA or ROCm: what the device clock asks of torch.cuda.

Nothing is asked before the job has initialised CUDA itself: to ask a driver is to initialise it, and a process that has
done so cannot fork ranks or loader workers that use it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from rankscope.device_clock import DeviceClock, Event
from rankscope.guard import Guard
from rankscope.patch import Undo
from rankscope.timeline import Timeline


class Cuda:
    """torch.cuda, which is ROCm's too. Other accelerators have no question for a capture under way."""

    def is_in_use(self) -> bool:
        """False in a child that was forked after CUDA's start, too."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> torch.cuda.Stream:
        """The calling thread's, of its current device. In an autograd callback that is the caller's of backward."""
        return torch.cuda.current_stream()

    def new_event(self) -> Event:
        """One that can tell the time."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        return event


def install(timeline: Timeline, guard: Guard) -> Sequence[Undo]:
    """Start the clock. Nothing to do in a torch for the CPU."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch's
        return []
    own = random.Random()  # noqa: S311 - not a secret; and the job's own random numbers stay as they are
    clock = DeviceClock(timeline, guard, Cuda(), own.random)
    clock.start()
    return [clock.stop]
